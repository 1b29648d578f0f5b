// Command etcd is etcd itself: its own main package has replace lines and cannot be built from outside.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
