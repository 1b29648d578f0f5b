"""Every Python of a job tells its stacks on a signal, and nothing else of it changes."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parent.parent / "src")

# Tells its own stacks as the agent asks for them, and what was written.
TELL = """
import os, signal
def here(): os.kill(os.getpid(), 58)
def told():
    for n in os.listdir('/proc/self/fd'):
        try: name = os.readlink('/proc/self/fd/' + n)
        except OSError: continue
        if 'aviflow-stacks-%d-' % os.getpid() in name: return open('/proc/self/fd/' + n).read()
here()
print(told())
"""


@unittest.skipUnless(sys.platform == "linux", "signals and /proc of Linux")
class Stacks(unittest.TestCase):
    def run_python(self, program, *, path=(), options=(), **environment):
        environment = {"AVIFLOW_SOCKET": "/nowhere", **environment}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, *path]), **environment}
        environment = {name: value for name, value in environment.items() if value is not None}
        command = [sys.executable, *options, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def test_stacks_are_told(self):
        done = self.run_python(TELL)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"Stack \(most recent call first\):")
        self.assertIn("in here", done.stdout)

    def test_without_memory_files_nothing_is_left_on_disk(self):
        with tempfile.TemporaryDirectory() as folder:
            removed = "import os; del os.memfd_create\nimport runpy; runpy.run_module('sitecustomize')\n"
            done = self.run_python(removed + TELL, options=["-S"], TMPDIR=folder)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("in here", done.stdout)
            self.assertEqual(os.listdir(folder), [])

    def test_elsewhere_nothing_is_registered(self):
        done = self.run_python(TELL, AVIFLOW_SOCKET=None)
        self.assertEqual(done.returncode, -58)

    def test_a_child_of_a_fork_has_a_file_of_its_own(self):
        program = "import os\nif os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        done = self.run_python(program + TELL)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("in here", done.stdout)

    def test_a_descriptor_that_another_took_is_left_to_it(self):
        # As a program does that closes all that it has not opened, and then opens its own.
        program = """
import os, sys
theirs = None
for n in map(int, os.listdir('/proc/self/fd')):
    try: ours = 'aviflow-stacks' in os.readlink('/proc/self/fd/%d' % n)
    except OSError: continue
    if ours:
        theirs = n
        os.dup2(os.open('/dev/null', os.O_RDONLY), theirs)
if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(os.readlink('/proc/self/fd/%d' % theirs))
"""
        done = self.run_python(program + TELL)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(done.stdout.startswith("/dev/null\n"))
        self.assertIn("in here", done.stdout)
        # One that was closed, and is nobody's.
        done = self.run_python(program.replace("os.dup2(os.open('/dev/null', os.O_RDONLY), theirs)", "os.close(n)")
                               .replace("print(os.readlink", "0 and (os.readlink") + TELL)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("in here", done.stdout)

    def test_another_sitecustomize_is_run_too(self):
        with tempfile.TemporaryDirectory() as folder:
            other = Path(folder) / "sitecustomize.py"
            other.write_text("import builtins; builtins.other = __file__\n")
            done = self.run_python("print(other); import sitecustomize; print(sitecustomize.__file__)", path=[folder])
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(done.stdout.split(), [str(other)] * 2)
            # One that fails is told as it would have been, and stacks are told nevertheless.
            other.write_text("raise ValueError('other')\n")
            done = self.run_python(TELL, path=[folder])
            self.assertEqual(done.returncode, 0)
            self.assertIn("ValueError: other", done.stderr)
            self.assertIn("in here", done.stdout)

    def test_a_handler_is_gone_with_another_program(self):
        done = self.run_python("import os; os.execvp('sh', ['sh', '-c', 'grep SigCgt /proc/self/status; ls -l /proc/self/fd'])")
        caught = int(next(line for line in done.stdout.splitlines() if "SigCgt" in line).split()[1], 16)
        self.assertFalse(caught & 1 << (58 - 1))
        self.assertNotIn("aviflow-stacks", done.stdout)


if __name__ == "__main__":
    unittest.main()
