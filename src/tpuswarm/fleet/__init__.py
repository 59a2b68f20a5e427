"""Create, keep and reach the machines of swarm.toml.

`spec/` reads the file, `decide/` is pure (state in, actions out), `store/` keeps the fleet's document, `hosts/` reaches
machines over SSH, `keeper/` runs the loop, `apply/` checks and previews what `up` and `init` do.

Each rule has a reason from the cloud: grants, budgets, zones without capacity, machines that die as they are created.
"""
