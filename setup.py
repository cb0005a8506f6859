"""Copies the demo models into the wheel. All other settings of the package are in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# `specdec up` without a model serves these, in a clone and in an installed package alike. Their 14 MB (weights of 16
# bits, which a wheel compresses to 12 MB) are in the wheel and not in a package of their own: one release has one
# artefact, whose models are those that its tests ran on, and a client-only install stays below 60 MB with them. The
# other folders of models/demo are for the tests and examples of a clone.
DEMO_MODELS = ("models/demo/target", "models/demo/draft", "models/demo/eagle3")


class BuildWithDemoModels(build_py):
    """Adds the files of the models below specdec/, where the command line looks for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in DEMO_MODELS:
            for file in sorted(Path(folder).iterdir()):
                copy = Path(self.build_lib, "specdec", folder, file.name)
                self.mkpath(str(copy.parent))
                self.copy_file(str(file), str(copy))


setup(cmdclass={"build_py": BuildWithDemoModels})
