"""Plans, runs and devices for people and for other tools: text, pages, traces, graphs."""

from tvmhet.report.benchmark import benchmark_to_text
from tvmhet.report.devices import cluster_table, device_sheet, devices_json, devices_table
from tvmhet.report.dot import plan_to_dot
from tvmhet.report.html import plan_to_html
from tvmhet.report.table import kernels_to_text, plan_to_text
from tvmhet.report.trace import plan_to_trace, run_to_trace, save_trace

__all__ = [
    "benchmark_to_text",
    "cluster_table",
    "device_sheet",
    "devices_json",
    "devices_table",
    "kernels_to_text",
    "plan_to_dot",
    "plan_to_html",
    "plan_to_text",
    "plan_to_trace",
    "run_to_trace",
    "save_trace",
]
