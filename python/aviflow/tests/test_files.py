import os
import tempfile
import unittest
from pathlib import Path

import aviflow


class FilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.target = self.folder / "step-1"

    def left(self):
        return sorted(entry.name for entry in self.folder.iterdir())

    def test_file(self):
        with aviflow.atomic_write(self.target) as file:
            file.write(b"new")
            self.assertFalse(self.target.exists())
        self.assertEqual(self.target.read_bytes(), b"new")
        with aviflow.atomic_write(self.target, "w") as file:
            file.write("é")
            self.assertEqual(self.target.read_bytes(), b"new")
        self.assertEqual(self.target.read_bytes(), "é".encode())
        self.assertEqual(self.left(), ["step-1"])

    def test_file_follows_the_umask(self):
        before = os.umask(0o027)
        self.addCleanup(os.umask, before)
        with aviflow.atomic_write(self.target):
            pass
        self.assertEqual(self.target.stat().st_mode & 0o777, 0o640)

    def test_file_that_fails_leaves_the_old_one(self):
        self.target.write_bytes(b"old")
        with self.assertRaises(KeyError), aviflow.atomic_write(self.target) as file:
            file.write(b"half")
            raise KeyError
        self.assertEqual(self.target.read_bytes(), b"old")
        self.assertEqual(self.left(), ["step-1"])

    def test_file_is_never_appended_to(self):
        with (
            self.assertRaisesRegex(ValueError, "written anew"),
            aviflow.atomic_write(self.target, "a"),
        ):
            pass

    def test_folder(self):
        with aviflow.atomic_dir(self.target) as partial:
            (partial / "shard").mkdir()
            (partial / "shard" / "0").write_bytes(b"weights")
            self.assertFalse(self.target.exists())
        self.assertEqual((self.target / "shard" / "0").read_bytes(), b"weights")
        self.assertEqual(self.left(), ["step-1"])

    def test_folder_that_fails_leaves_nothing(self):
        with self.assertRaises(KeyError), aviflow.atomic_dir(self.target) as partial:
            (partial / "0").write_bytes(b"half")
            raise KeyError
        self.assertEqual(self.left(), [])

    def test_folder_is_not_replaced(self):
        self.target.mkdir()
        (self.target / "0").write_bytes(b"old")
        with self.assertRaisesRegex(FileExistsError, "use a new name"):
            with aviflow.atomic_dir(self.target):
                self.fail("the body ran")
        self.assertEqual((self.target / "0").read_bytes(), b"old")

    def test_remains_of_killed_writers(self):
        (self.folder / ".step-1.partial-0a").write_bytes(b"half")
        (self.folder / ".step-2.partial-0b").mkdir()
        (self.folder / ".step-2.partial-0b" / "0").write_bytes(b"half")
        (self.folder / "step-3").mkdir()
        self.assertEqual(aviflow.remove_partials(self.folder), 2)
        self.assertEqual(self.left(), ["step-3"])


if __name__ == "__main__":
    unittest.main()
