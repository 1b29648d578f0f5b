// Command pause is process 1 that does nothing but reap what is orphaned.
//
// Without arguments it is the process of a pod's sandbox, and ends on SIGTERM or SIGINT. With -hold it holds
// the namespaces of a node: it says "ready" on its standard output and ends when its standard input does, so
// that all processes of the namespace end with whoever holds the other end of that pipe, however that ends.
package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	if len(os.Args) > 1 && os.Args[1] == "-hold" {
		go func() {
			fmt.Println("ready")
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(0)
		}()
	}
	for s := range signals {
		if s != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && err != syscall.EINTR {
				break
			}
		}
	}
}
