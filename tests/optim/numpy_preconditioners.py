"""SOAP, Shampoo, KL-Shampoo and the steepest steps on one matrix, in float64 NumPy.

Written line by line from the equations, without stacks, blocks or shared parts; `test_references`
compares the package's transforms with them.
"""

import numpy as np


def adopted(factor, basis):
    """The basis, having checked that it holds the factor's eigenvectors, largest value first.

    After one gradient a factor lacks rank, and any basis of what it lacks will do; but which one is
    taken decides the next directions.
    """
    size = len(factor)
    np.testing.assert_allclose(basis.T @ basis, np.eye(size), atol=1e-10)
    rotated = basis.T @ factor @ basis
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-10 * np.trace(factor))
    assert np.all(np.diff(np.diag(rotated)) <= 1e-10 * np.trace(factor))
    return basis


class Soap:
    """SOAP of the authors' code; the first gradient moves nothing."""

    def __init__(self, b1=0.95, b2=0.95, shampoo_beta=None, eps=1e-8, every=10, sides=(True, True)):
        self.b1, self.b2, self.eps, self.every, self.sides = b1, b2, eps, every, sides
        self.bs = b2 if shampoo_beta is None else shampoo_beta
        self.t = -1
        self.reordered = 0

    def __call__(self, g):
        g = np.asarray(g, np.float64)
        self.t += 1
        if self.t == 0:
            self.l, self.r = (1 - self.bs) * g @ g.T, (1 - self.bs) * g.T @ g
            self.m, self.v = np.zeros_like(g), np.zeros_like(g)
            return np.zeros_like(g)
        rotated = self.ql.T @ g @ self.qr
        self.m = self.b1 * self.m + (1 - self.b1) * rotated
        self.v = self.b2 * self.v + (1 - self.b2) * rotated**2
        d = self.ql @ (self.m / (np.sqrt(self.v) + self.eps)) @ self.qr.T
        d *= np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t)
        m = self.ql @ self.m @ self.qr.T
        self.l = self.bs * self.l + (1 - self.bs) * g @ g.T
        self.r = self.bs * self.r + (1 - self.bs) * g.T @ g
        if self.t % self.every == 0:
            if self.sides[0]:
                order = np.argsort(-np.diag(self.ql.T @ self.l @ self.ql), kind="stable")
                self.reordered += np.any(order != np.arange(len(order)))
                self.v = self.v[order]
                self.ql, _ = np.linalg.qr(self.l @ self.ql[:, order])
            if self.sides[1]:
                order = np.argsort(-np.diag(self.qr.T @ self.r @ self.qr), kind="stable")
                self.reordered += np.any(order != np.arange(len(order)))
                self.v = self.v[:, order]
                self.qr, _ = np.linalg.qr(self.r @ self.qr[:, order])
        self.m = self.ql.T @ m @ self.qr
        return d

    def adopt(self, left, right):
        """Takes the bases that were made of the first gradient."""
        self.ql = adopted(self.l, left) if self.sides[0] else np.eye(len(self.l))
        self.qr = adopted(self.r, right) if self.sides[1] else np.eye(len(self.r))


class Shampoo:
    """Shampoo with averages, bias correction and Adam's length."""

    def __init__(self, b1=0.9, b2=0.999, eps=1e-12, e=0.25, trace=False, graft=True, every=10):
        self.b1, self.b2, self.eps, self.e, self.every = b1, b2, eps, e, every
        self.trace, self.graft = trace, graft
        self.t = 0
        self.l = self.r = self.m = self.first = self.second = 0.0

    def __call__(self, g):
        g = np.asarray(g, np.float64)
        self.t += 1
        if self.b2 == 1:
            self.l, self.r, seen, graft_b2 = self.l + g @ g.T, self.r + g.T @ g, 1.0, 0.999
        else:
            self.l = self.b2 * self.l + (1 - self.b2) * g @ g.T
            self.r = self.b2 * self.r + (1 - self.b2) * g.T @ g
            seen, graft_b2 = 1 - self.b2**self.t, self.b2
        if (self.t - 1) % self.every == 0:
            self.a, self.b = (self._root(factor / seen) for factor in (self.l, self.r))
        d = self.a @ g @ self.b
        if self.trace:
            d = d * np.sqrt(np.trace(self.l / seen))
        self.first = self.b1 * self.first + (1 - self.b1) * g
        self.second = graft_b2 * self.second + (1 - graft_b2) * g**2
        if self.graft:
            corrected = self.second / (1 - graft_b2**self.t)
            adam = self.first / (1 - self.b1**self.t) / (np.sqrt(corrected) + 1e-8)
            d = d * np.linalg.norm(adam) / np.linalg.norm(d)
        self.m = self.b1 * self.m + (1 - self.b1) * d
        return self.m / (1 - self.b1**self.t)

    def _root(self, factor):
        values, vectors = np.linalg.eigh(factor + self.eps * np.eye(len(factor)))
        return vectors @ np.diag(np.maximum(values, self.eps) ** -self.e) @ vectors.T


class KLShampoo:
    """KL-Shampoo of the authors' code; the first gradient moves nothing."""

    def __init__(self, b1=0.9, b2=0.98, eps=1e-8, every=10, scale=0.1, floor=4000.0):
        self.b1, self.b2, self.eps, self.every = b1, b2, eps, every
        self.scale, self.floor = scale, floor
        self.t = -1

    def __call__(self, g):
        g = np.asarray(g, np.float64)
        rows, columns = g.shape
        b1, b2 = self.b1, self.b2
        self.t += 1
        if self.t == 0:
            self.sa, self.sb = (1 - b2) * g @ g.T / columns, (1 - b2) * g.T @ g / rows
            self.la, self.lb = np.full(rows, self.scale), np.full(columns, self.scale)
            self.m = np.zeros_like(g)
            return np.zeros_like(g)
        self.m = b1 * self.m + (1 - b1) * g
        p = self.qa.T @ self.m @ self.qb
        w = 1 / np.sqrt(np.outer(self.la, self.lb))
        w = w / (1 + self.eps * w)
        d = self.qa @ (p * w) @ self.qb.T
        sa = g @ self.qb @ np.diag(1 / self.lb) @ self.qb.T @ g.T / columns
        sb = g.T @ self.qa @ np.diag(1 / self.la) @ self.qa.T @ g / rows
        self.sa = b2 * self.sa + (1 - b2) * sa
        self.sb = b2 * self.sb + (1 - b2) * sb
        h = self.qa.T @ g @ self.qb
        la = b2 * self.la + (1 - b2) * np.mean(h**2 / self.lb[None, :], axis=1)
        lb = b2 * self.lb + (1 - b2) * np.mean(h**2 / self.la[:, None], axis=0)
        self.la, self.lb = self._clamped(la), self._clamped(lb)
        if self.t % self.every == 0:
            self.qa, _ = np.linalg.qr(self.sa @ self.qa)
            self.qb, _ = np.linalg.qr(self.sb @ self.qb)
        return d

    def adopt(self, left, right):
        """Takes the bases that were made of the first gradient."""
        self.qa, self.qb = adopted(self.sa, left), adopted(self.sb, right)

    def _clamped(self, scales):
        inverse = np.minimum(1 / np.sqrt(scales), max(self.floor, min(len(scales), 4000)))
        return 1 / inverse**2


class Steepest:
    """Sign or spectral descent with momentum."""

    def __init__(self, spectral, momentum=0.0):
        self.spectral, self.mu, self.m = spectral, momentum, 0.0

    def __call__(self, g):
        self.m = self.mu * self.m + (1 - self.mu) * np.asarray(g, np.float64)
        if not self.spectral:
            return np.sign(self.m)
        u, _, vt = np.linalg.svd(self.m, full_matrices=False)
        return u @ vt
