"""The scoreboard: every verb and the whole experts beside every peer, on published models' shapes.

    python -m benchmarks.scoreboard            # measures, then writes benchmarks/results/scoreboard.json, docs/performance.md's
                                               # table and docs/roofline.png from it; at most about 25 minutes
    python -m benchmarks.scoreboard --render   # writes table and picture anew from the results that are there

`verbs` says what is compared, `measure` how, `render` shows it.
"""
