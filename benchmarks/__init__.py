"""Benchmarks of gpuload: rivals side by side, and each stage against its ceiling. See README.md in this folder."""
