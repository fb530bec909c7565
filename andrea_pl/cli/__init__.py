"""The command `andrea`, from the words on a command line to an exit code.

app ─────> arguments ──> parser ──> configuration files, paths      options; errors are one line
    ─────> trainer ────> runs, language, data                       fit, validate, test, predict, prepare
    ─────> commands                                                 generate, export, build-extension
"""
