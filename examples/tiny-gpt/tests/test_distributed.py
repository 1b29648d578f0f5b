"""Gangs of four processes, as the platform starts them. Run with the environment's Python."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1]
RANKS = 4
REQUEUE = 75


class DistributedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.corpus = cls.folder / "corpus.bin"
        cls.corpus.write_bytes(b"".join(p.read_bytes() for p in sorted(EXAMPLE.glob("*.py"))) * 10)

    def start(self, run, *options):
        """The ranks' processes; `run` names the folders that attempts share."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        outside = {k: v for k, v in os.environ.items() if not k.startswith("AVIFLOW_")}
        ranks = []
        for rank in range(RANKS):
            environment = {
                **outside,
                "AVIFLOW_SEED": "42",
                "AVIFLOW_CHECKPOINT_DIR": str(self.folder / run / "checkpoints"),
                "AVIFLOW_OUTPUT_DIR": str(self.folder / run / "out"),
                "AVIFLOW_DATA_CORPUS": str(self.corpus),
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(RANKS),
                "JAX_PROCESS_ID": str(rank),
                "JAX_LOCAL_DEVICE_IDS": str(rank % 2),
            }
            command = [sys.executable, "train.py", "--layers", "1", "--batch", "8", *options]
            process = subprocess.Popen(
                command, cwd=EXAMPLE, env=environment, stdout=subprocess.PIPE, text=True
            )
            self.addCleanup(process.stdout.close)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            ranks.append(process)
        return ranks

    def finish(self, ranks, code):
        outputs = [process.communicate()[0] for process in ranks]
        self.assertEqual([process.returncode for process in ranks], [code] * RANKS, outputs)
        return outputs

    def losses(self, run):
        return (self.folder / run / "out" / "losses.jsonl").read_text()

    def test_resumed_equals_uninterrupted_to_the_bit(self):
        schedule = ("--steps", "12", "--warmup", "4", "--checkpoint-every", "5")
        first, *others = self.finish(self.start("whole", *schedule), 0)
        validation, entropy = first.splitlines()[-2:]
        self.assertRegex(validation, r"^validation loss: \d+\.\d{4}$")
        self.assertRegex(entropy, r"^byte-bigram entropy: \d+\.\d{4}$")
        for rank, output in enumerate(others, 1):
            self.assertIn(f"rank {rank} of {RANKS} on ", output)
            self.assertNotIn("validation loss", output)

        self.finish(self.start("parts", *schedule, "--stop-after", "7"), REQUEUE)
        self.assertEqual(len(self.losses("parts").splitlines()), 7)
        # As if the save after step 7 had been cut short: it goes on from step 5.
        (damaged,) = (self.folder / "parts" / "checkpoints").glob("step-00000007-*")
        damaged.write_bytes(damaged.read_bytes()[:-1])
        resumed, *_ = self.finish(self.start("parts", *schedule), 0)
        self.assertIn("step 6 of 12 comes next", resumed)
        self.assertEqual(self.losses("parts"), self.losses("whole"))
        self.assertEqual(resumed.splitlines()[-2], validation)

    def test_a_signal_to_one_rank_stops_all_at_one_step(self):
        ranks = self.start("signal", "--steps", "100000")
        for line in ranks[0].stdout:
            if line.startswith("step 10/"):
                break
        ranks[2].send_signal(signal.SIGTERM)
        first, *_ = self.finish(ranks, REQUEUE)
        self.assertIn("stopped after step", first)
        done = len(self.losses("signal").splitlines())
        (newest,) = (self.folder / "signal" / "checkpoints").glob(f"step-{done:08d}-*")

    def test_a_killed_rank_ends_the_others(self):
        ranks = self.start("killed", "--steps", "100000")
        for line in ranks[0].stdout:
            if line.startswith("step 10/"):
                break
        ranks[3].kill()
        for process in ranks:
            process.communicate()
            self.assertNotIn(process.returncode, (0, REQUEUE))


if __name__ == "__main__":
    unittest.main()
