"""The demo's workload: a byte-level transformer (`elastic.demo.model`) on real text (`elastic.demo.text`).

Importing this package, or `elastic.demo.text`, does not import JAX.
"""
