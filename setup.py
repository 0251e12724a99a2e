"""Source distributions that depend on the sources and SOURCE_DATE_EPOCH alone; all else is in pyproject.toml."""

import gzip
import io
import os
import tarfile
from typing import Any

from setuptools import setup
from setuptools.command.sdist import sdist


class ReproducibleSdist(sdist):
    """setuptools writes the times and owners of the files, and the time of the build."""

    def make_archive(self, *args: Any, **more: Any) -> str:
        """Return the archive's path, its entries sorted, of one time and without owners."""
        path = super().make_archive(*args, **more)
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or not path.endswith(".tar.gz"):
            return path
        content = io.BytesIO()
        with (
            tarfile.open(path) as old,
            tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for entry in sorted(old.getmembers(), key=lambda each: each.name):
                entry.mtime = int(epoch)
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.pax_headers = {}
                entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
                new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
        ):
            packed.write(content.getvalue())
        return path


setup(cmdclass={"sdist": ReproducibleSdist})
