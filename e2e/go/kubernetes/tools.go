//go:build tools

// Package kubernetes pins what the Kubernetes binaries of the tests are built of. k8s.io/kubernetes has replace
// lines, so `go install` refuses it; this module replaces every staging module by its published version.
package kubernetes

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-proxy"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
