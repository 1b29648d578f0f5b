# Runs one step of a build: `venv FOLDER` or `pip ARGUMENTS`.
#
# Standard input is held open by the builder and by nobody else: at its end,
# however the builder came to end, this process group ends too.
import glob
import os
import sys
import threading


def end_with_builder():
    while os.read(0, 1):
        pass
    os.killpg(0, 9)


threading.Thread(target=end_with_builder, daemon=True).start()
os.dup2(1, 2)
step, arguments = sys.argv[1], sys.argv[2:]
if step == "venv":
    import venv

    venv.EnvBuilder(symlinks=True, with_pip=False).create(arguments[0])
else:
    # The pip that comes with Python, run from its wheel: the environment stays
    # without one, as nothing may be installed into it later.
    import runpy
    import sysconfig

    wheels = sysconfig.get_config_var("WHEEL_PKG_DIR")
    found = glob.glob(os.path.join(wheels, "pip-*.whl")) if wheels else []
    if not found:
        try:
            import ensurepip

            found = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
        except ImportError:
            pass
    if not found:
        print("AVIFLOW: no pip")
        sys.exit(1)
    sys.path.insert(0, sorted(found)[-1])
    sys.argv = ["pip", *arguments]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
