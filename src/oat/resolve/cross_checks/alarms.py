"""Checks of the section `alarms`. The run must report the metric of each alarm that is set (one of them if
the alarm can watch several), and the alarm `gold` must have a bound."""

from oat.config.alarm_settings import AlarmsConfig
from oat.config.load import where
from oat.control.alarms import METRICS
from oat.errors import ConfigError
from oat.resolve.resolved import Resolved


def refuse_silent(resolved: Resolved) -> None:
    """Refuse an alarm that is set and cannot be raised in this run.

    Raises:
        ConfigError: the run reports no metric of an alarm that was set, or the alarm `gold` was set without a
            bound.
    """
    alarms, origins = resolved.config.alarms, resolved.origins
    for name, metrics in METRICS.items():
        alarm, default = getattr(alarms, name), getattr(AlarmsConfig(), name)
        is_set = ("alarms", name) in origins and alarm != default and alarm.action != "off"
        if is_set and not {*metrics} & resolved.watched:
            raise ConfigError(
                f"{where(('alarms', name), origins)}: nothing would ever raise alarms.{name}: algorithm "
                f"{resolved.config.algorithm.name} with these settings does not report "
                f"{' or '.join(metrics)}, which it watches; {_remedy(resolved, name)}"
            )
    gold = alarms.gold
    if gold.drop is None and gold != AlarmsConfig().gold and gold.action != "off":
        raise ConfigError(
            f"{where(('alarms', 'gold'), origins)}: nothing would ever raise alarms.gold without a bound; "
            "set alarms.gold.drop, in the units of evaluation.gold"
        )


def _remedy(resolved: Resolved, alarm: str) -> str:
    if alarm == "gold":
        return "name evaluation.gold, or remove it"
    settings = [resolved.objective.setting_for.get(metric) for metric in METRICS[alarm]]
    named = next((setting for setting in settings if setting), None)
    return f"set algorithm.{named} above 0, or remove it" if named else "remove it"
