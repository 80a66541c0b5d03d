"""The README is the page of a package index: it follows no path of the repository, and its examples run."""

import re
from pathlib import Path

import fedproj
from fedproj import _server, _step

PAGE = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_links_work_on_a_package_index():
    links = re.findall(r"\]\(([^)]*)\)", PAGE)
    assert all(link.startswith(("#", "https://")) for link in links), links


def test_the_functions_in_the_tables_exist():
    for owner, of in [("step", _step.Step), ("client", _step.Finish), ("server", _server.Server), ("fedproj", fedproj)]:
        names = set(re.findall(rf"\b{owner}\.([a-z_]+)", PAGE)) - {"ray", "flower"}
        # These three are attributes of the objects.
        assert names and {name for name in names if not hasattr(of, name)} <= {"start", "weights", "config"}, owner


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_run, a_sweep, a_method, data, network = BLOCKS
    a_sweep = a_sweep.replace('"federation.rounds": 20', '"federation.rounds": 2').replace('fedproj.load("runs/digits/…")\n', "")
    a_method = a_method.replace('data="cifar10"', 'settings={"federation.rounds": 3}')
    # CIFAR is no part of the package; the next line would read it.
    network = network.replace('fedproj.run(data="cifar10", model=net)\n', "assert net.layers[-1]['op'] == 'linear'\n")
    given = "import numpy as np\nx, y = np.random.default_rng(0).normal(size=(8, 32, 32, 3)), np.arange(8) % 2\n"
    given += "x_test, y_test, x_public = x, y, x\n"
    data = given + data.replace('fedproj.run(data=data, model="resnet8", method="fedproj")\n', "assert len(data) == 8\n")
    for at, block in enumerate([a_run, a_sweep, a_method, data, network]):
        path = tmp_path / f"block{at}.py"
        path.write_text(block if "import fedproj" in block else f"import fedproj\n{block}", encoding="utf-8")
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), {"__name__": "__main__"})
