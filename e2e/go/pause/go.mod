module aviflow.dev/e2e/pause

go 1.24
