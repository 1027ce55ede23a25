// Command ads is the control plane of the benchmark. It serves NameTables over
// incremental ADS without TLS, each as one resource without name and version, as
// istiod does. With -shards it serves them as nametap-discovery does: as a resource for
// each shard, of which it sends those that have changed.
//
// Each line on standard input is the path of a file with the wire bytes of a NameTable. The
// command sends the table to its one client, and again when the client opens another
// stream. It prints "stream" when a client has subscribed, "ack" for each ACK, and "nack"
// with the reason for each NACK. It ends at the end of standard input.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api/digest"
)

func main() {
	shards := flag.Bool("shards", false, "serve a resource for each shard")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: ads [-shards] ADDRESS:PORT <PATHS")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), *shards); err != nil {
		fmt.Fprintln(os.Stderr, "ads:", err)
		os.Exit(1)
	}
}

// run serves until standard input ends.
func run(address string, shards bool) error {
	listener, err := net.Listen("tcp", address) //nolint:noctx // lives as long as the process
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	s := &server{changed: make(chan struct{})}
	rpc := grpc.NewServer()
	discovery.RegisterAggregatedDiscoveryServiceServer(rpc, s)
	failed := make(chan error, 1)
	go func() { failed <- rpc.Serve(listener) }()

	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		table, err := os.ReadFile(lines.Text())
		if err != nil {
			return fmt.Errorf("reading a table: %w", err)
		}
		resources := []*discovery.Resource{{Resource: &anypb.Any{TypeUrl: digest.TypeURL, Value: table}}}
		if shards {
			if resources, err = resourcesOf(table); err != nil {
				return err
			}
		}
		s.push(resources)
		select {
		case err := <-failed:
			return fmt.Errorf("serving: %w", err)
		default:
		}
	}
	rpc.Stop()
	return lines.Err()
}

// A server sends its latest table.
type server struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer

	mu sync.Mutex
	// table has the resources; nil before the first push. version counts the pushes.
	table   []*discovery.Resource
	version int
	// changed is closed and replaced on each push.
	changed chan struct{}
}

// push replaces the table and sends it.
func (s *server) push(table []*discovery.Resource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table = table
	s.version++
	close(s.changed)
	s.changed = make(chan struct{})
}

// DeltaAggregatedResources sends every table to a client that has subscribed.
func (s *server) DeltaAggregatedResources(stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	fmt.Println("stream")
	go report(stream)
	sent := map[string]string{} // versions, by name
	for {
		s.mu.Lock()
		table, version, changed := s.table, s.version, s.changed
		s.mu.Unlock()
		if table != nil {
			if err := stream.Send(response(table, sent, version)); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// report prints a line for each answer of the client, until the stream ends.
func report(stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) {
	for {
		request, err := stream.Recv()
		switch {
		case err != nil:
			return
		case request.GetResponseNonce() == "":
		case request.GetErrorDetail() != nil:
			fmt.Printf("nack %q\n", request.GetErrorDetail().GetMessage())
		default:
			fmt.Println("ack")
		}
	}
}

// resourcesOf returns a resource for each shard of a table.
func resourcesOf(table []byte) (resources []*discovery.Resource, err error) {
	shards, err := digest.Split(table)
	for shard, entries := range shards {
		resources = append(resources, &discovery.Resource{
			Name: strconv.Itoa(shard), Version: digest.VersionOf(digest.HashOf(entries)), Resource: &anypb.Any{TypeUrl: digest.TypeURL, Value: entries},
		})
	}
	return resources, err
}

// response makes one push of the resources whose versions were not sent. It notes them in sent.
func response(table []*discovery.Resource, sent map[string]string, version int) *discovery.DeltaDiscoveryResponse {
	id := strconv.Itoa(version)
	r := &discovery.DeltaDiscoveryResponse{SystemVersionInfo: id, Nonce: id, TypeUrl: digest.TypeURL}
	for _, resource := range table {
		if name := resource.GetName(); name == "" || sent[name] != resource.GetVersion() {
			r.Resources, sent[name] = append(r.Resources, resource), resource.GetVersion()
		}
	}
	return r
}
