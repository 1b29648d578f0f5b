import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train  # noqa: F401  (sets the threads before jax is loaded)
import jax
import numpy as np

import model

CONFIG = model.ModelConfig(layers=1)


class ModelTest(unittest.TestCase):
    def test_size(self):
        whole = model.init(model.ModelConfig(), 0)
        self.assertEqual(sum(leaf.size for leaf in jax.tree.leaves(whole)), 885_888)

    def test_same_seed_same_weights(self):
        one, two, other = (jax.tree.leaves(model.init(CONFIG, seed)) for seed in (1, 1, 2))
        self.assertTrue(all(np.array_equal(a, b) for a, b in zip(one, two)))
        self.assertFalse(all(np.array_equal(a, b) for a, b in zip(one, other)))

    def test_no_byte_sees_a_later_one(self):
        params = model.init(CONFIG, 0)
        rng = np.random.default_rng(0)
        for block in params["blocks"]:  # those that start at zero would hide a leak
            block["attention_out"] = rng.standard_normal(block["attention_out"].shape, np.float32)
        one = rng.integers(0, 256, (1, CONFIG.context))
        two = one.copy()
        two[0, 70:] = (two[0, 70:] + 1) % 256
        logits = jax.jit(lambda params, inputs: model.logits(params, inputs, CONFIG))
        before, after = (np.asarray(logits(params, inputs)) for inputs in (one, two))
        np.testing.assert_array_equal(before[0, :70], after[0, :70])
        self.assertTrue((before[0, 70:] != after[0, 70:]).any(axis=-1).all())


if __name__ == "__main__":
    unittest.main()
