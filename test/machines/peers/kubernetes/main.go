// Command kubernetes is a Kubernetes control plane without its scheduler: etcd and the commands that save
// and restore it, the API server, the controllers and kubectl, each as a subcommand. nametap is tested
// against it.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdctl/v3/ctlv3"
	"go.etcd.io/etcd/etcdutl/v3/etcdutl"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: kubernetes etcd|etcdctl|snapshot|apiserver|controllers|kubectl [FLAG...]")
		os.Exit(2)
	}
	name := os.Args[1]
	os.Args = append([]string{name}, os.Args[2:]...)
	var command *cobra.Command
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "etcdctl":
		ctlv3.MustStart()
		return
	case "snapshot": // of etcdutl
		command = etcdutl.NewSnapshotCommand()
	case "apiserver":
		command = apiserver.NewAPIServerCommand()
	case "controllers":
		command = controllers.NewControllerManagerCommand()
	case "kubectl":
		command = kubectl.NewDefaultKubectlCommand()
	default:
		fmt.Fprintf(os.Stderr, "kubernetes %q: want etcd, etcdctl, snapshot, apiserver, controllers or kubectl\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
