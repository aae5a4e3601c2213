"""What others do, written afresh from their formulas: each file is one method.

Those that skip steps (`skipping.Skipper`) get the velocity of the guider's answer, v = (x - x0) / sigma. On the demo
models that is the network's output, and as the formulas are linear in it, forecasting it before or after guidance is
the same.
"""
