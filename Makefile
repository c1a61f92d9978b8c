PYTHON ?= python3

build:
	$(PYTHON) setup.py -q build_ext --inplace
