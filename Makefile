PYTHON ?= python3

.PHONY: build
build:
	$(PYTHON) setup.py -q build_ext --inplace
