"""The patches for hosts live beside the package in the repository, and inside it once installed."""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildWithPatches(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree("patches", Path(self.build_lib) / "megaprof" / "patches", dirs_exist_ok=True)


# The hot part of the timeline; `megaprof.recorders.tape` does the same in Python where there is no compiler.
TAPE = Extension("megaprof.recorders._tape", ["megaprof/recorders/_tape.c"], optional=True)

setup(cmdclass={"build_py": BuildWithPatches}, ext_modules=[TAPE])
