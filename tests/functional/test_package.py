import ast
import inspect
import subprocess
import sys
from pathlib import Path

import torch

import thrust_rllib.functional as functional
from tests import reference

PACKAGE = Path(functional.__file__).parent
SCRIPT = """
import sys
import thrust_rllib.functional
loaded = {name.split('.')[0] for name in sys.modules}
print(sorted(loaded & {'ray', 'gymnasium', 'pettingzoo', 'numpy', 'torch'}))
"""


def test_importing_it_needs_torch_and_numpy_only():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=PACKAGE.parents[1], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['numpy', 'torch']"


def test_no_file_imports_the_rest_of_the_package():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.startswith("thrust_rllib"):
                    assert name.startswith("thrust_rllib.functional"), (path.name, name)
                else:
                    assert name.split(".")[0] in {*sys.stdlib_module_names, "torch", "numpy"}, (
                        path.name,
                        name,
                    )


def test_the_reference_never_imports_the_package():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert imported <= {*sys.stdlib_module_names, "torch", "numpy"} and "numpy" in imported


def test_public_names_exist_and_are_documented():
    assert functional.__all__ == sorted(functional.__all__)
    for name in functional.__all__:
        doc = inspect.getdoc(getattr(functional, name))
        assert doc and "Args:" in doc, name


def test_nothing_waits_for_the_device():
    # `.item()`, `.cpu()`, `.tolist()` and `.numpy()` would.
    waits = {"item", "cpu", "tolist", "numpy", "nonzero"}
    for path in PACKAGE.glob("*.py"):
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert not waits & set(calls), (path.name, waits & set(calls))


def test_all_functions_run_on_the_meta_device():
    # The meta device has no numbers to read: whatever runs here neither waits nor branches on data.
    x = torch.zeros(4, 3, device="meta")
    mask = torch.zeros(4, 3, device="meta", dtype=torch.bool)
    f = functional
    results = [
        *f.generalized_advantages(x, x, mask, mask, x, 0.9, 0.8, mask),
        f.clipped_surrogate(x, x, x, 0.2),
        f.clip_indicator(x, x, 0.2),
        f.approximate_kl(x, x),
        f.value_loss_change_clipped(x, x, x, 0.2),
        f.standardize(x, mask, 0, "add"),
        f.squared_error(x, x),
        f.huber_error(x, x),
    ]
    assert all(y.shape == x.shape and y.is_meta for y in results)
    scalars = [
        f.explained_variance(x, x, mask),
        f.masked_mean(x, mask),
        *f.masked_moments(x, mask),
        f.redundancy_penalty([x, x], [mask[:, 0], mask[:, 1]]),
        f.redundancy_penalty([x, x[:, :2]]),
        f.linear_cka([x, x], [mask[:, 0], mask[:, 1]]),
        f.linear_cka([x, x[:, :2]]),
        f.jensen_shannon([x, x], [mask[:, 0], mask[:, 1]]),
        f.jensen_shannon([x, x], head_sizes=[1, 2]),
        f.total_variation([x, x], [mask[:, 0], mask[:, 1]]),
        f.time_averaged_total_variation([x, x], head_sizes=[1, 2]),
        f.system_neural_diversity([x, x], [x, x], [mask[:, 0], mask[:, 1]]),
        f.clip_by_global_norm_([x, None], 0.5),
    ]
    assert all(y.shape == () and y.is_meta for y in scalars)
    assert f.cross_correlation(x, x[:, :2], mask[:, 0]).shape == (3, 2)
    assert f.relative_accuracy(x, x, mask).shape == (4,)
    assert f.clip_by_norm_([x], 0.5) is None and f.clip_by_value_([x], 0.5) is None
