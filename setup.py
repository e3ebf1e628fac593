"""What setup.cfg cannot say: patches and documents, the C file, archives that are the same wherever they are made."""

import gzip
import os
import shutil
import tarfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


class BuildWithFiles(build_py):
    """The patches for hosts, and the pages and schemas that `megaprof mcp` shows, are beside the package in the
    repository, and inside it once installed."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "megaprof"
        shutil.copytree("patches", package / "patches", dirs_exist_ok=True)
        (package / "docs").mkdir(exist_ok=True)
        for page in sorted(Path("docs").glob("*.md")):
            shutil.copy(page, package / "docs")
        shutil.copytree("docs/schemas", package / "docs" / "schemas", dirs_exist_ok=True)


class SameSources(sdist):
    """setuptools heeds SOURCE_DATE_EPOCH for wheels, and not for source distributions."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
        if format != "gztar" or not epoch:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def same(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as archive,
        ):
            archive.add(base_dir, filter=same)  # in order of names
        return path


# The hot part of the timeline; `megaprof.recorders.tape` does the same in Python where there is no compiler.
TAPE = Extension("megaprof.recorders._tape", ["megaprof/recorders/_tape.c"], optional=True)

setup(cmdclass={"build_py": BuildWithFiles, "sdist": SameSources}, ext_modules=[TAPE])
