import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import aviflow
from fake_agent import FakeAgent


class Number:
    """As arrays of one element behave."""

    def __float__(self):
        return 0.5


class OnThePlatform(unittest.TestCase):
    def setUp(self):
        self.agent = FakeAgent()
        self.addCleanup(self.agent.clean)
        environment = {"AVIFLOW_SOCKET": self.agent.path, "RANK": "1"}
        patch = mock.patch.dict(os.environ, environment)
        patch.start()
        self.addCleanup(patch.stop)
        aviflow._forget()
        self.addCleanup(aviflow._forget)
        aviflow._warned.clear()

    def told(self):
        if self.agent.peer is None:
            self.agent.accept()
        return [m for m in self.agent.messages() if m["type"] not in ("hello", "stop?")]

    def test_log(self):
        aviflow.log(7, loss=Number(), grad_norm=float("nan"), note="text", none=None, total_steps=9)
        self.assertEqual(
            self.told(),
            [
                {
                    "type": "metrics",
                    "step": 7,
                    "values": {"loss": 0.5, "grad_norm": "NaN"},
                    "total_steps": 9,
                    "tokens": None,
                }
            ],
        )

    def test_own_time_is_added_up_until_a_step_is_reported(self):
        waited = []
        with mock.patch.object(aviflow.time, "perf_counter", side_effect=[0, 0.1, 1, 1.1, 1.3]):
            with aviflow.compute():
                pass
            with self.assertRaises(KeyError), aviflow.compute(lambda: waited.append("inner")):
                # What is inside another counts once.
                with aviflow.compute(lambda: waited.append("no")):
                    pass
                raise KeyError
        aviflow.log(1, loss=1)
        aviflow.log(2, loss=1)
        with aviflow.compute(lambda: waited.append("yes")):
            pass
        aviflow.log(3, own_seconds=0.5)
        aviflow.log(4)
        first, second, third, fourth = (m["values"] for m in self.told())
        self.assertAlmostEqual(first["own_seconds"], 0.4)
        self.assertEqual((second, third, fourth), ({"loss": 1.0}, {"own_seconds": 0.5}, {}))
        self.assertEqual(waited, ["yes"])

    def test_what_an_accelerator_reports_late_is_the_training_s_own(self):
        def wait():
            raise RuntimeError("CUDA error")

        with self.assertRaises(RuntimeError), aviflow.compute(wait):
            pass

    def test_role_and_collective(self):
        aviflow.role(3)
        aviflow.collective(17)
        with self.assertLogs("aviflow", "WARNING") as logs:
            aviflow.role(-1)
            aviflow.collective("no number")
        self.assertEqual(len(logs.output), 2)
        self.assertEqual(
            self.told(), [{"type": "role", "role": 3}, {"type": "collective", "number": 17}]
        )

    def test_float_keeps_every_digit(self):
        aviflow.log(1, loss=0.1 + 0.2)
        self.assertEqual(self.told()[0]["values"]["loss"].hex(), (0.1 + 0.2).hex())

    def test_checkpoint(self):
        with aviflow.checkpoint(5, Path("/c/5")):
            pass
        with self.assertRaises(KeyError), aviflow.checkpoint(6, "/c/6"):
            raise KeyError
        self.assertEqual(
            [(m["phase"], m["step"], m["path"]) for m in self.told()],
            [
                ("begin", 5, "/c/5"),
                ("complete", 5, "/c/5"),
                ("begin", 6, "/c/6"),
                ("failed", 6, "/c/6"),
            ],
        )

    def test_data(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "corpus")
            file.write_bytes(b"abc")
            aviflow.log_data("one", file)
            aviflow.log_data("folder", folder)
            aviflow.log_data("known", sha256="0" * 64, size=8)
        one, whole, known = self.told()
        digest = hashlib.sha256(b"abc").hexdigest()
        self.assertEqual((one["sha256"], one["bytes"]), (digest, 3))
        listing = f"{digest}  corpus\n".encode()
        self.assertEqual(
            (whole["sha256"], whole["bytes"]), (hashlib.sha256(listing).hexdigest(), 3)
        )
        self.assertEqual((known["sha256"], known["bytes"]), ("0" * 64, 8))

    def test_facts_and_summary(self):
        aviflow.log_facts(framework="jax", path=Path("/x"), count=2)
        aviflow.log_summary({"validation loss": Number()})
        facts, summary = self.told()
        self.assertEqual(facts["values"], {"framework": "jax", "path": "/x", "count": 2})
        self.assertEqual(summary["values"], {"validation loss": 0.5})

    def test_mistakes_warn_once_and_raise_nothing(self):
        self.assertFalse(aviflow.should_stop())
        with self.assertLogs("aviflow", "WARNING") as logs:
            for _ in range(2):
                aviflow.log("no step", loss=1)
                aviflow.log_data("corpus", "/no/such/file")
                aviflow.log_facts(text="x" * 70_000)
        self.assertEqual(len(logs.output), 3)
        self.assertEqual(self.told(), [])

    def test_should_stop(self):
        self.assertFalse(aviflow.should_stop())
        self.agent.accept()
        self.agent.push('{"stop":true,"reason":"preempted"}\n')
        self.assertTrue(aviflow.should_stop())
        self.assertEqual(aviflow.stop_reason(), "preempted")

    def test_forked_child_speaks_for_itself(self):
        aviflow.log(1, loss=1)
        child = os.fork()
        if child == 0:
            aviflow.log(2, loss=2)
            os._exit(0 if aviflow.flush() else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        aviflow.log(3, loss=3)
        self.assertEqual([m["step"] for m in self.told()], [1, 3])
        self.agent.accept()
        hello, _, only = self.agent.messages()
        self.assertEqual((hello["pid"], only["step"]), (child, 2))

    def test_everything_arrives_before_the_process_ends(self):
        script = (
            "import aviflow\nfor i in range(500): aviflow.log(i, loss=i)\naviflow.log_summary(x=1)"
        )
        with subprocess.Popen([sys.executable, "-c", script], env=child_environment()) as child:
            self.agent.accept()
            messages = self.agent.until_the_end()
        self.assertEqual(child.returncode, 0)
        self.assertEqual(len(messages), 503)
        self.assertEqual(messages[-1]["values"], {"x": 1})


class Elsewhere(unittest.TestCase):
    def setUp(self):
        patch = mock.patch.dict(os.environ)
        patch.start()
        self.addCleanup(patch.stop)
        for name in list(os.environ):
            if name.startswith("AVIFLOW_") or name in ("RANK", "JAX_PROCESS_ID"):
                del os.environ[name]
        aviflow._forget()
        self.addCleanup(aviflow._forget)

    def test_hooks_do_nothing(self):
        with self.assertNoLogs("aviflow") if hasattr(self, "assertNoLogs") else mock.MagicMock():
            aviflow.log(1, loss=1.0)
            aviflow.log_data("corpus", "/no/such/file")
            aviflow.log_facts(a=1)
            aviflow.log_summary(a=1)
            aviflow.role(1)
            aviflow.collective(1)
            with aviflow.compute(lambda: self.fail("nobody asks for the time")):
                pass
            with aviflow.checkpoint(1, "/c"):
                pass
        self.assertFalse(aviflow.enabled())
        self.assertFalse(aviflow.should_stop())
        self.assertIsNone(aviflow.stop_reason())
        self.assertTrue(aviflow.flush())

    def test_place(self):
        self.assertIsNone(aviflow.checkpoint_dir())
        self.assertIsNone(aviflow.output_dir())
        self.assertIsNone(aviflow.data_dir("corpus"))
        self.assertIsNone(aviflow.job_name())
        self.assertIsNone(aviflow.seed())
        self.assertEqual(aviflow.attempt(), 1)
        self.assertEqual(aviflow.rank(), 0)
        self.assertEqual(aviflow.cache_dir(), Path.home() / ".cache" / "aviflow")
        os.environ.update(
            AVIFLOW_CHECKPOINT_DIR="/c",
            AVIFLOW_OUTPUT_DIR="/o",
            AVIFLOW_DATA_C4_EN="/d",
            AVIFLOW_CACHE_DIR="/k",
            AVIFLOW_JOB="sft",
            AVIFLOW_ATTEMPT="3",
            AVIFLOW_SEED="42",
            JAX_PROCESS_ID="2",
        )
        self.assertEqual(aviflow.checkpoint_dir(), Path("/c"))
        self.assertEqual(aviflow.output_dir(), Path("/o"))
        self.assertEqual(aviflow.data_dir("c4.en"), Path("/d"))
        self.assertEqual(aviflow.cache_dir(), Path("/k"))
        self.assertEqual((aviflow.job_name(), aviflow.attempt(), aviflow.seed()), ("sft", 3, 42))
        self.assertEqual(aviflow.rank(), 2)
        os.environ["RANK"] = "1"
        self.assertEqual(aviflow.rank(), 1)
        os.environ["AVIFLOW_RANK"] = "0"
        self.assertEqual(aviflow.rank(), 0)
        os.environ["AVIFLOW_SEED"] = "many"
        self.assertIsNone(aviflow.seed())

    def test_sigterm(self):
        called = []
        before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        self.addCleanup(setattr, aviflow, "_terminated", False)
        self.assertTrue(aviflow.install_sigterm_handler())
        self.assertFalse(aviflow.should_stop())
        signal.raise_signal(signal.SIGTERM)
        self.assertTrue(aviflow.should_stop())
        self.assertEqual(aviflow.stop_reason(), "SIGTERM")
        self.assertEqual(called, [1])


def child_environment():
    """The tests' own environment, in which the child finds the package too."""
    source = str(Path(aviflow.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source}


if __name__ == "__main__":
    unittest.main()
