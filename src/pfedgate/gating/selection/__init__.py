"""The choice of blocks under a budget (paper, §4.2, eq. 6).

``I* = argmax I @ G  subject to  cost(I) <= budget`` for every bound resource at once. The blocks of a
group cost the same, so the best k of a group are its k most important ones. A solver therefore looks
only for the number of blocks per group. `Selector` takes the first solver that suits:

=========== ============================================= =====================================
`Frontier`  few groups, any resources                     exact, a look-up per batch
`Programme` many groups, one resource without products    exact, a dynamic programme
`Prices`    many groups, several resources or products    within half a percent, never over
=========== ============================================= =====================================

- ``budget``: what a batch may use (`Budget`), and the face of this room (`Selector`).
- ``costs``: groups, cost terms and their sum (`CostModel`); the arrays that solvers see (`Problem`).
- ``exact``: `Frontier` and `Programme`.
- ``prices``: `Prices`.
"""
