"""The command that trains a model: options, devices, the run and what it leaves."""
