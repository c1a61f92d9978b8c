"""`python -m rl view RUN`: a local page to browse a run's rollouts, down to single tokens, also while the run goes on.

    index.py    what is known of each file of the run; files are read once, and again where they change
    detail.py   one rollout in full, its tokens as texts
    gaps.py     the learner's log-probabilities of its tokens, computed anew
    server.py   answers in JSON; page.html, the scripts and view.css show them

Nothing here writes to the run. Texts are a model's and a sandbox's: they travel as JSON and become text nodes, never HTML.
"""
