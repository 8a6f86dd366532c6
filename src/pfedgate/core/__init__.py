"""The nouns of federated learning, which every other room imports.

types       State, Card, Round, Local, Update, Task: the data that goes round
algorithm   the shape of a method, and the page to read before writing one
mergers     accumulators that turn updates into the server's next State
state       arithmetic on States · seeds: randomness by path · modules: a task's network
errors      what rooms raise and catch in common · measure: FLOPs, bytes and seconds of a call
"""
