package nds_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// printHosts is an [nds.ApplyFunc] that prints the hosts of shards.
func printHosts(shards map[int][]byte) error {
	fmt.Println("hosts:")
	for _, at := range slices.Sorted(maps.Keys(shards)) {
		table := &api.NameTable{}
		if err := proto.Unmarshal(shards[at], table); err != nil {
			return err
		}
		for _, host := range slices.Sorted(maps.Keys(table.GetTable())) {
			fmt.Println(" ", host, table.GetTable()[host].GetIps())
		}
	}
	return nil
}

// exampleConfig returns the configuration of a client of a control plane without TLS.
func exampleConfig(addr string) nds.Config {
	return nds.Config{
		Addr:      addr,
		Plaintext: true,
		Node:      nds.Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
	}
}

// run runs a client in the background. The function that it returns ends the client.
func run(client *nds.Client) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = client.Run(ctx) // always nil
	}()
	return func() {
		cancel()
		<-done
	}
}

// A client prints what changes with each push of the control plane: all hosts of the shards that differ.
func Example() {
	controlPlane, err := fakexds.New(fakexds.Options{}) // in place of istiod
	if err != nil {
		fmt.Println(err)
		return
	}
	defer controlPlane.Stop()

	client, err := nds.New(exampleConfig(controlPlane.Addr()), printHosts)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer run(client)()

	controlPlane.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"db.example.com": {Registry: "External", Ips: []string{"192.0.2.53"}},
	}})
	<-client.Ready()
	version := controlPlane.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"db.example.com":             {Registry: "External", Ips: []string{"192.0.2.53"}},
		"web.shop.svc.cluster.local": {Registry: "Kubernetes", Shortname: "web", Namespace: "shop", Ips: []string{"10.96.0.1"}},
	}})
	if _, err := controlPlane.WaitAnswer(context.Background(), version); err != nil {
		fmt.Println(err)
		return
	}
	status := client.Status()
	fmt.Println("connected:", status.Connected, "pushes:", status.Pushes, "rejected:", status.Rejected)

	// Output:
	// hosts:
	//   db.example.com [192.0.2.53]
	// hosts:
	//   web.shop.svc.cluster.local [10.96.0.1]
	// connected: true pushes: 2 rejected: 0
}
