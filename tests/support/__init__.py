"""What several tests share; a helper of one file stays in it. No function's name has two meanings.

| module | holds |
|---|---|
| `toys` | small federations, models and tasks for tests of one algorithm; a run, a client, its first States |
| `world` | the federation, tasks and runs on which every algorithm is held to the laws; `Outcome` compares runs |
| `files` | tiny image files with the schemas of the hub |
| `zoo` | networks with every operation that slicing has a rule for, and ours |
| `compare` | gated models, sliced and masked, held against each other; gates that say what a test wants |
| `gates` | inputs of every kind and gates for them |
| `selection` | cost models, importances and the oracles of the selection |
| `fakes` | a grid in this process, whose nodes answer at once |
| `fleets` | real fleets: apps, processes, patience |
| `states` | what clients keep on the nodes of either |
| `lies`, `crooked` | nodes that misbehave, in what they answer and below the app |
| `runs` | folders of small runs on digits |
| `studies` | recipes, data of pages, outcomes of runs that never were |
| `cli` | the command, called in this process |
| `pages` | the documentation's pages and blocks, run as a reader would |
| `browser` | a headless Chromium |

States are compared with `pfedgate.core.state.equal`: same names, types, shapes and bits.
"""
