"""The bridge to OpenUnlearning: its command lines gain ROSU and its relatives, without a fork or a patch.

Discovery is Hydra's: the plugin in ``hydra_plugins`` adds our configuration groups, and each of our trainer
configurations brings the callback that registers our classes when a job starts. OpenUnlearning is no importable package
(``trainer``, ``data``, ``evals`` exist only while its ``src`` folder is on ``sys.path``), so nothing here imports it
at module level.
"""
