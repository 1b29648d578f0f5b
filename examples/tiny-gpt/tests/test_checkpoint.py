import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
import checkpoint

SETTINGS = {"seed": 42, "learning rate": 1e-3}


class CheckpointTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def save(self, step):
        vectors = (np.arange(5, dtype=np.float32) / (step + k) for k in range(1, 4))
        state = checkpoint.State(step, *vectors)
        return state, checkpoint.save(self.folder, state, SETTINGS, keep=3)

    def steps(self):
        return [step for step, _ in checkpoint.found(self.folder)]

    def newest(self):
        with contextlib.redirect_stderr(io.StringIO()) as warnings:
            return checkpoint.newest(self.folder), warnings.getvalue()

    def test_what_was_saved_is_loaded_to_the_bit(self):
        state, path = self.save(7)
        self.assertEqual(checkpoint.step_of(path), 7)
        loaded = checkpoint.load(self.folder, 7, SETTINGS)
        for name in ("weights", "first_moment", "second_moment"):
            self.assertEqual(getattr(loaded, name).tobytes(), getattr(state, name).tobytes())

    def test_the_last_ones_are_kept(self):
        for step in (50, 100, 150, 1000, 200):
            self.save(step)
        self.assertEqual(self.steps(), [1000, 200, 150])

    def test_nothing_there(self):
        self.assertEqual(self.newest(), (None, ""))
        self.assertIsNone(checkpoint.newest(self.folder / "none"))

    def test_damaged_ones_are_left_out_with_a_warning(self):
        _, good = self.save(1)
        _, cut = self.save(2)
        _, flipped = self.save(3)
        cut.write_bytes(cut.read_bytes()[:-1])
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 1
        flipped.write_bytes(content)
        path, warnings = self.newest()
        self.assertEqual(path, good)
        self.assertEqual(warnings.count("is damaged"), 2)
        with self.assertRaisesRegex(SystemExit, "no undamaged checkpoint of step 3"):
            checkpoint.load(self.folder, 3, SETTINGS)

    def test_half_written_ones_are_not_seen(self):
        _, path = self.save(1)
        path.rename(path.with_name(f".{path.name}.partial-00"))
        self.assertEqual(self.newest(), (None, ""))

    def test_other_settings_end_the_run(self):
        self.save(1)
        with self.assertRaisesRegex(SystemExit, "seed was 42 and is 43"):
            checkpoint.load(self.folder, 1, {**SETTINGS, "seed": 43})


class LossesTest(unittest.TestCase):
    def test_the_file_is_cut_where_the_run_goes_on(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "out", "losses.jsonl")
            for first, last, resumed in ((1, 5, 0), (4, 6, 3)):
                with train.open_losses(path, resumed) as file:
                    for step in range(first, last + 1):
                        file.write(f'{{"step": {step}, "loss_hex": "run {resumed}"}}\n')
            lines = path.read_text().splitlines()
        self.assertEqual([line.count("run 0") for line in lines], [1, 1, 1, 0, 0, 0])


if __name__ == "__main__":
    unittest.main()
