// Command coredns is CoreDNS with the plugins that answer from a hosts file, from other
// nameservers, and from a cache. It is a separate module because of CoreDNS's dependencies.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"    // keeps it on the loopback interface
	_ "github.com/coredns/coredns/plugin/cache"   // keeps the replies of other nameservers
	_ "github.com/coredns/coredns/plugin/forward" // answers from other nameservers
	_ "github.com/coredns/coredns/plugin/hosts"   // answers from a hosts file
)

func main() { coremain.Run() }
