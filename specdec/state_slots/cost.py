"""A running estimate of seconds as a function of size."""

MEMORY = 0.95
"""What remains of a measurement's weight after each further one: about the last 20 count."""
HICCUP = 3.0
"""A measurement counts as at most this many times the estimate or the average: another process may run."""
STEADY = 0.1
"""Weight, in measurements, of the assumption of no fixed cost. Where all sizes are alike, cost is then in
proportion to size."""


class OnlineCost:
    """Fit `fixed + slope × size` to recent measurements by least squares; neither is ever negative."""

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.fixed_s = self.slope_s = 0.0
        """Seconds at any size, and seconds per unit of size; both 0 before the first measurement."""

    def observe(self, size: float, seconds: float) -> None:
        """Take in what work of this size took."""
        if self._weight > 1:
            seconds = min(seconds, HICCUP * max(self.predict(size), self._y / self._weight))
        keep = self._memory
        self._weight, self._x, self._y = (
            keep * self._weight + 1,
            keep * self._x + size,
            keep * self._y + seconds,
        )
        self._xx, self._xy = keep * self._xx + size * size, keep * self._xy + size * seconds
        weight = self._weight + STEADY
        determinant = weight * self._xx - self._x * self._x
        slope = (weight * self._xy - self._x * self._y) / determinant if determinant > 0 else 0.0
        self.slope_s = max(slope, 0.0)
        self.fixed_s = (self._y - self.slope_s * self._x) / weight
        if self.fixed_s < 0:
            self.fixed_s, self.slope_s = 0.0, self._xy / self._xx

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def discount(self, factor: float) -> None:
        """Multiply the estimate: where nothing is tried, nothing else tells that it has become cheaper."""
        self._y, self._xy = factor * self._y, factor * self._xy
        self.fixed_s, self.slope_s = factor * self.fixed_s, factor * self.slope_s

    def predict(self, size: float) -> float:
        """Return the seconds that work of this size takes."""
        return self.fixed_s + self.slope_s * size

    def fitting(self, seconds: float) -> float:
        """Return the largest size that takes this long: 0 if none does, infinite if all do."""
        spare_s = seconds - self.fixed_s
        if spare_s <= 0:
            return 0.0
        return spare_s / self.slope_s if self.slope_s else float("inf")
