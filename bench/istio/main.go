// Command istio is the DNS server of Istio's agent, with a table from a file. It is a
// separate module because of Istio's dependencies, and because one process cannot have two
// generated packages for the same protobuf messages.
//
// Like Istio's agent it reads the search list and the nameservers from /etc/resolv.conf.
package main

import (
	"fmt"
	"os"

	"google.golang.org/protobuf/proto"
	"istio.io/istio/pkg/dns/client"
	dnsproto "istio.io/istio/pkg/dns/proto"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: istio ADDRESS:PORT NAMESPACE DOMAIN TABLE-FILE")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "istio:", err)
		os.Exit(1)
	}
}

// serve answers from the NameTable whose wire bytes are in file, until the process ends.
func serve(address, namespace, domain, file string) error {
	wire, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading the table: %w", err)
	}
	table := &dnsproto.NameTable{}
	if err := proto.Unmarshal(wire, table); err != nil {
		return fmt.Errorf("parsing the table: %w", err)
	}
	server, err := client.NewLocalDNSServer(namespace, domain, address)
	if err != nil {
		return fmt.Errorf("making the server: %w", err)
	}
	server.UpdateLookupTable(table)
	server.StartDNS()
	select {}
}
