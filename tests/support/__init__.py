"""What several tests share; a helper of one file stays in it. No helper's name has two meanings.

| module | holds |
|---|---|
| `toys` | small federations, models and tasks for tests of one algorithm; a run, a client, its first States |
| `world` | the federation, tasks and runs on which every algorithm is held to the laws; `Outcome` compares runs |
| `scrambling` | federations whose labels in one part are random |
| `files` | tiny image files with the schemas of the hub |
| `zoo` | networks with every operation that slicing has a rule for, and ours |
| `compare` | gated models, sliced and masked, held against each other; gates that say what a test wants |
| `gates` | inputs of every kind and gates for them |
| `selection` | cost models, importances and the oracles of the selection |
| `fakes` | a grid in this process, and what its nodes store |
| `fleets` | real fleets: apps, processes, what their nodes store |
| `lies`, `crooked` | nodes that misbehave, in what they answer and below the app |
| `pages` | the documentation's pages and blocks, run as a reader would |
| `browser` | a headless Chromium |

States are compared with `pfedgate.core.state.equal`: same names, types, shapes and bits.
"""
