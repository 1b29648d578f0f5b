"""JAX finds its processes without arguments, by a class that is put before those that it knows."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parent.parent / "src")

# As much of JAX as finds a cluster.
CLUSTERS = """
class ClusterEnv:
    _cluster_types = []
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._cluster_types.append(cls)

class Other(ClusterEnv):
    name = "other"
    @classmethod
    def is_env_present(cls): return True
"""

FIND = """
from jax._src import clusters
env = next(env for env in clusters.ClusterEnv._cluster_types if env.is_env_present())
print(env.name)
if env.name == "aviflow":
    address = env.get_coordinator_address(timeout_secs=1, override_coordinator_port=None)
    print(address, env.get_process_count(), env.get_process_id())
"""

PLACE = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:20017", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


class Jax(unittest.TestCase):
    def find(self, clusters=CLUSTERS, **environment):
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, "jax", "_src", "clusters")
            package.mkdir(parents=True)
            for parent in (package.parent.parent, package.parent):
                (parent / "__init__.py").touch()
            (package / "__init__.py").write_text(clusters)
            own = {name: value for name, value in os.environ.items() if name not in PLACE}
            own.pop("AVIFLOW_SOCKET", None)
            path = os.pathsep.join([SOURCES, folder])
            return subprocess.run(
                [sys.executable, "-c", FIND],
                env={**own, "PYTHONPATH": path, **environment},
                capture_output=True,
                text=True,
                timeout=60,
            )

    def test_the_place_of_the_process_is_found_first(self):
        done = self.find(AVIFLOW_SOCKET="/nowhere", **PLACE)
        self.assertEqual((done.stdout.split(), done.stderr), (["aviflow", "10.0.0.1:20017", "4", "2"], ""))

    def test_elsewhere_nothing_is_added(self):
        for environment in ({}, PLACE, {"AVIFLOW_SOCKET": "/nowhere"}):
            done = self.find(**environment)
            self.assertEqual((done.stdout.split(), done.stderr), (["other"], ""), environment)

    def test_a_jax_that_is_another_is_left_alone(self):
        done = self.find("class ClusterEnv:\n    _cluster_types = ()\n", AVIFLOW_SOCKET="/nowhere", **PLACE)
        self.assertIn("StopIteration", done.stderr)
        done = self.find("ClusterEnv = None\n", AVIFLOW_SOCKET="/nowhere", **PLACE)
        self.assertNotIn("_join", done.stderr)


if __name__ == "__main__":
    unittest.main()
