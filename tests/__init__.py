"""The tests. A package, so that helper modules are imported as ``tests.<name>`` from any test folder."""
