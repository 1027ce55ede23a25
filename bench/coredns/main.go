// Command coredns is CoreDNS with the plugin that answers from a hosts file.
// It is a module of its own because of what CoreDNS needs.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"  // keeps it on the loopback interface
	_ "github.com/coredns/coredns/plugin/hosts" // what is measured
)

func main() { coremain.Run() }
