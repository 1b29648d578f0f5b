import json
import math
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train  # noqa: F401  (finds the hooks where they are not installed)
import data
import prepare

TEXT = np.frombuffer(bytes(range(256)) * 40, np.uint8)


class SamplerTest(unittest.TestCase):
    def setUp(self):
        self.sampler = data.Sampler(TEXT, context=16, batch=8, seed=1)

    def starts(self, sampler, first, last):
        return [sampler.start(s, i) for s in range(first, last + 1) for i in range(sampler.batch)]

    def test_same_seed_same_windows(self):
        again = data.Sampler(TEXT, context=16, batch=8, seed=1)
        self.assertEqual(self.starts(self.sampler, 1, 200), self.starts(again, 1, 200))
        other = data.Sampler(TEXT, context=16, batch=8, seed=2)
        self.assertNotEqual(self.starts(self.sampler, 1, 2), self.starts(other, 1, 2))

    def test_a_resumed_run_sees_what_comes_next(self):
        whole = self.starts(self.sampler, 1, 200)
        data._epoch.cache_clear()
        self.assertEqual(whole[123 * 8 :], self.starts(self.sampler, 124, 200))

    def test_processes_share_the_batch(self):
        whole = self.sampler.windows_of(3, range(8))
        parts = [self.sampler.windows_of(3, range(r * 2, r * 2 + 2)) for r in range(4)]
        np.testing.assert_array_equal(whole, np.concatenate(parts))
        self.assertEqual(whole.shape, (8, 17))

    def test_an_epoch_has_each_window_once(self):
        seen = self.starts(self.sampler, 1, 2 * self.sampler.windows // 8 + 1)
        for epoch in range(2):
            of_epoch = seen[epoch * self.sampler.windows : (epoch + 1) * self.sampler.windows]
            self.assertEqual(len(set(of_epoch)), len(of_epoch))
            self.assertEqual({b - a for a, b in zip(sorted(of_epoch), sorted(of_epoch)[1:])}, {16})

    def test_windows_end_within_the_text(self):
        for length in range(16 * 9, 16 * 12):
            sampler = data.Sampler(TEXT[:length], context=16, batch=8, seed=length)
            starts = self.starts(sampler, 1, 40)
            self.assertGreaterEqual(min(starts), 0)
            self.assertLessEqual(max(starts) + 17, length)

    def test_too_small_a_corpus(self):
        with self.assertRaisesRegex(SystemExit, "too small"):
            data.Sampler(TEXT[:100], context=16, batch=8, seed=1)


class CorpusTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_split_is_the_whole_text_once(self):
        corpus = data.Corpus(TEXT, "")
        np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), TEXT)
        self.assertEqual(len(corpus.held_out), int(len(TEXT) * data.HELD_OUT))

    def test_validation_windows_do_not_overlap(self):
        for length in (17, 18, 100, 1000):
            starts = data.validation_starts(TEXT[:length], 16, 50)
            self.assertLessEqual(starts[-1] + 17, length)
            self.assertTrue(all(b - a >= 16 for a, b in zip(starts, starts[1:])))

    def test_prepare_and_load(self):
        root = self.folder / "lib"
        for name in ("a.py", "test/b.py", "pkg/c.py", "d.txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        path = prepare.prepare(self.folder / "cache", root)
        corpus = data.load(path)
        self.assertEqual(sorted(corpus.text.tobytes().split(b"\n")), [b"a.py", b"pkg/c.py"])
        self.assertEqual(path.name, f"corpus-{corpus.sha256[:16]}.bin")
        self.assertEqual(data.load(path.parent).sha256, corpus.sha256)
        facts = json.loads(next(path.parent.glob("*.json")).read_text())
        self.assertEqual((facts["sha256"], facts["bytes"]), (corpus.sha256, len(corpus.text)))
        (root / "a.py").write_text("later")
        self.assertEqual(prepare.prepare(self.folder / "cache", root), path)

    def test_damaged_or_missing(self):
        damaged = self.folder / f"corpus-{'0' * 16}.bin"
        damaged.write_bytes(b"text")
        with self.assertRaisesRegex(SystemExit, "damaged"):
            data.load(damaged)
        with self.assertRaisesRegex(SystemExit, "prepare.py"):
            data.load(self.folder / "none.bin")
        (self.folder / f"corpus-{'1' * 16}.bin").write_bytes(b"text")
        with self.assertRaisesRegex(SystemExit, "holds 2 files"):
            data.load(self.folder)


class BigramTest(unittest.TestCase):
    def entropy(self, text):
        return data.bigram_entropy(np.frombuffer(text, np.uint8))

    def test_known_cases(self):
        self.assertEqual(self.entropy(b"abababab"), 0)
        # After each a come a and b equally often; after b always a.
        self.assertAlmostEqual(self.entropy(b"aabaaba"), 4 / 6 * math.log(2))
        uniform = np.random.default_rng(0).integers(0, 4, 1_000_000).astype(np.uint8)
        self.assertAlmostEqual(data.bigram_entropy(uniform), math.log(4), places=3)

    def test_loss_of_a_fitted_model(self):
        text = np.frombuffer(b"ab" * 100_000, np.uint8)
        self.assertAlmostEqual(data.bigram_loss(text, text), math.log(100_256 / 100_001), places=5)
        self.assertGreater(data.bigram_loss(text, TEXT), data.bigram_entropy(TEXT))


if __name__ == "__main__":
    unittest.main()
