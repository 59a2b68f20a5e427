"""Run Jupyter on a machine over SSH; on a slice, one kernel whose cells all workers repeat.

Jupyter's kernel serves one process. The room adds what docs/notebooks.md promises for a slice, hence its size: one
program of all workers, interrupts, the first failure and a refusal after it, differences of output, widgets, `input()`,
`%%worker`, lost workers, and connections that only the slice's key opens. ipyparallel, which was tried, has no widgets
and no input, notices deaths late and loses lines.
"""
