"""For pytest (-p at_once): prints why a test failed as soon as it fails, for runs that may be cut off early."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Teller(config.pluginmanager.get_plugin("terminalreporter")))


class _Teller:
    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}\n", flush=True)
