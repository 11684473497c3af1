# Two commands for a newcomer: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1

.PHONY: demo test slow lint clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Apiece needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.ready  ## local, fedavg and reptile on digits: a table and a report
	.venv/bin/apiece compare --methods local,fedavg,reptile --seeds 0-2 --out runs/demo
	.venv/bin/apiece report runs/demo -o runs/demo/report.html

test: .venv/.ready
	.venv/bin/python -m pytest -n auto -m "not slow"

slow: .venv/.ready  ## claims about accuracy over seeds, long conformance
	.venv/bin/python -m pytest -n auto -m slow

lint: .venv/.ready
	.venv/bin/ruff check src tests benchmarks experiments
	.venv/bin/ruff format --check src tests benchmarks experiments
	.venv/bin/mypy
	.venv/bin/lint-imports

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
