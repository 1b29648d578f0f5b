# Makes the packages of a lock into a layer: runs in the job's image, on what lies in FOLDER, without a shell.
#
# The packages are installed into a virtual environment that sees those of the image, as on one machine: what the image
# has in the same version is not taken again. Of that environment the layer has what was added, each file where it was,
# so that packages find what lies beside them (lib, share); "site" leads to the packages themselves.
import glob
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig

# How much of a program is searched for the interpreter: its first lines.
HEAD = 1024

# Variables by which packages would end up in another place, or others with them; some images come with such.
ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIREMENT", "PIP_CONSTRAINT")

# The image's own pip, else the one that comes with Python. It runs from where it lies.
RUN = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('pip', run_name='__main__', alter_sys=True)"


def pip():
    spec = importlib.util.find_spec("pip")
    if spec and spec.origin:
        return os.path.dirname(os.path.dirname(spec.origin))
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip and ensurepip.origin:
        folders.append(os.path.join(os.path.dirname(ensurepip.origin), "_bundled"))
    found = [wheel for folder in folders if folder for wheel in glob.glob(os.path.join(folder, "pip-*.whl"))]
    return found[0] if found else None


def install(folder, say):
    try:
        import venv
    except ImportError:
        return say("AVIFLOW: no venv")
    own = pip()
    if own is None:
        return say("AVIFLOW: no pip")
    below = [path for path in site.getsitepackages() if os.path.isdir(path)]
    made, layer = os.path.join(folder, "venv"), os.path.join(folder, "layer")
    # What a container left that was ended in the middle of this, and is run again.
    for path in (made, layer):
        shutil.rmtree(path, ignore_errors=True)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(made)
    (packages,) = glob.glob(os.path.join(made, "lib", "python*", "site-packages"))
    # As calls and not as paths, so that the .pth files of the image count too.
    base = os.path.join(packages, "_aviflow_base.pth")
    with open(base, "w") as file:
        file.write("; ".join(["import site", *(f"site.addsitedir({path!r})" for path in below)]) + "\n")
    bare = files(made)
    python = os.path.join(made, "bin", "python3")
    lock = os.path.join(folder, "lock.txt")
    with open(lock) as file:
        # pip takes it for a mistake if there is nothing to install.
        empty = all(not line.split("#")[0].strip() for line in file)
    if not empty:
        command = [python, "-I", "-u", "-c", RUN, own, *sys.argv[2:], "--requirement", lock]
        env = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **said)
        for line in child.stdout:
            say(line.decode(errors="replace").rstrip("\n"))
        if child.wait() != 0:
            return False
    os.makedirs(os.path.join(layer, "bin"))
    os.makedirs(os.path.join(layer, os.path.relpath(packages, made)))
    os.symlink(os.path.relpath(packages, made), os.path.join(layer, "site"))
    for name in files(made) - bare:
        path, target = os.path.join(made, name), os.path.join(layer, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.dirname(name) == "bin":
            lift(path, target, python)
        else:
            os.rename(path, target)
    return True


# All files below a folder, by their paths there.
def files(folder):
    found = set()
    for path, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found.update(os.path.relpath(os.path.join(path, name), folder) for name in names + links)
    return found


# Programs are run by the image's own interpreter: the environment is only here.
def lift(program, target, python):
    with open(program, "rb") as file:
        text = file.read()
    head, rest = text[:HEAD], text[HEAD:]
    if head.startswith(b"#!"):
        head = head.replace(os.fsencode(python), os.fsencode(sys.executable))
    with open(target, "wb") as file:
        file.write(head + rest)
    shutil.copymode(program, target)


def main():
    folder = sys.argv[1]
    with open(os.path.join(folder, "said"), "w") as said:

        def say(line):
            print(line, flush=True)
            print(line, file=said, flush=True)
            return False

        done = install(folder, say)
    with open(os.path.join(folder, "ended"), "w") as file:
        file.write("0" if done else "1")


main()
