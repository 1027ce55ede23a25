package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
)

// The demo's names: hosts of the example shop, and one of the world outside.
const (
	demoService   = "cart"
	demoNeighbour = "auth.platform"
	demoPod       = "postgres-0.postgres.data"
	demoPartner   = "api.payments.example.com"
	demoDatabase1 = "mysql-instance1.us-east-1.rds.amazonaws.com"
	demoDatabase2 = "mysql-instance2.us-east-1.rds.amazonaws.com"
	demoOutside   = "www.example.org"
)

// upstreamRecords are what the demo's nameserver, which stands for the world
// outside, knows.
var upstreamRecords = []string{ //nolint:gochecknoglobals // a constant list
	demoPartner + ". 60 IN A 203.0.113.20",
	demoDatabase1 + ". 60 IN A 203.0.113.11",
	demoDatabase2 + ". 60 IN A 203.0.113.12",
	demoOutside + ". 300 IN A 203.0.113.80",
	demoOutside + ". 300 IN AAAA 2001:db8::80",
}

// The live edit: the service's address in the examples, and the one it gets.
const (
	demoOldAddress = "10.96.10.12"
	demoNewAddress = "10.96.10.99"
)

// editTimeout is how long an edit may take to arrive before the demo fails.
const editTimeout = 10 * time.Second

// tour shows what a client of the agent gets, from real queries.
func (d *demo) tour(ctx context.Context) error {
	d.introduce()
	for _, step := range []func(context.Context) error{
		d.showService, d.showSearch, d.showCounts, d.showDatabases, d.showEdit, d.showForward,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) introduce() {
	d.out.printf("%s\n\n", d.out.bold("nametap: control plane, agent and tour in one process, on loopback"))
	d.out.printf("  control plane  %s, from %s\n", d.controlPlane.Addr(), d.path("shop"))
	d.out.printf("  agent          %s, UDP and TCP; %d hosts\n", d.dnsAddr, d.agent.Proxy().Table().Len())
	d.out.printf("  status         http://%s/debug/status\n", d.agent.StatusAddr())
	d.out.printf("  nameserver     %s, the demo's own, for names outside the mesh\n", d.upstream.Addr)
	d.out.printf("  resolv.conf    search %s\n", strings.Join(searchList(), " "))
	d.out.printf("                 options ndots:%d\n", demoNdots)
}

func (d *demo) showService(ctx context.Context) error {
	d.out.heading("A service by its short name, by its FQDN, and one of its neighbours")
	return errors.Join(
		d.query(ctx, demoService),
		d.query(ctx, demoService+"."+searchList()[0]),
		d.query(ctx, demoNeighbour),
		d.query(ctx, demoPod),
	)
}

func (d *demo) showSearch(ctx context.Context) error {
	d.out.heading("A name as a pod's resolver sends it, search domain and all: one answer")
	return d.query(ctx, demoPartner+"."+searchList()[0])
}

// showCounts measures what one getaddrinfo costs. The queries are counted where
// they are sent and where they arrive.
func (d *demo) showCounts(ctx context.Context) error {
	d.out.heading("What getaddrinfo(\"api.payments…\") costs, ndots:5, three search domains")
	direct, err := d.count(ctx, d.upstream.Addr.String())
	if err != nil {
		return err
	}
	through, err := d.count(ctx, d.dnsAddr)
	if err != nil {
		return err
	}
	d.out.printf("                         queries sent   at the nameserver\n")
	d.out.printf("  straight to it         %12d   %17d\n", direct.sent, direct.arrived)
	d.out.printf("  through nametap        %s   %17d\n", d.out.bold(fmt.Sprintf("%12d", through.sent)), through.arrived)
	return nil
}

// counts are the queries of one getaddrinfo.
type counts struct{ sent, arrived int }

func (d *demo) count(ctx context.Context, server string) (counts, error) {
	d.upstream.Reset()
	client := stubResolver{server: server, search: searchList(), ndots: demoNdots}
	if _, err := client.getaddrinfo(ctx, demoPartner); err != nil {
		return counts{}, err
	}
	return counts{sent: client.sent, arrived: len(d.upstream.Queries())}, nil
}

func (d *demo) showDatabases(ctx context.Context) error {
	d.out.heading("Two databases outside, without an address in the mesh: public DNS has one")
	return errors.Join(d.query(ctx, demoDatabase1), d.query(ctx, demoDatabase2))
}

// showEdit changes a file of the control plane's directory and waits for the
// agent's answer to change.
func (d *demo) showEdit(ctx context.Context) error {
	d.out.heading("A live edit: " + demoService + " moves from " + demoOldAddress + " to " + demoNewAddress)
	path := d.path("shop/shop.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("editing an example: %w", err)
	}
	edited := strings.ReplaceAll(string(text), demoOldAddress, demoNewAddress)
	const readable = 0o644
	if err := os.WriteFile(path, []byte(edited), readable); err != nil {
		return fmt.Errorf("editing an example: %w", err)
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, editTimeout)
	defer cancel()
	client := stubResolver{server: d.dnsAddr, search: searchList(), ndots: demoNdots}
	for {
		addrs, err := client.getaddrinfo(ctx, demoService)
		if err != nil {
			return fmt.Errorf("the edit did not arrive within %s: %w", editTimeout, err)
		}
		if slices.Contains(addrs, demoNewAddress) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	d.out.printf("  answered %s after the file was written\n", d.out.bold(time.Since(start).Round(time.Millisecond).String()))
	return d.query(ctx, demoService)
}

func (d *demo) showForward(ctx context.Context) error {
	d.out.heading("A name that is not the mesh's: forwarded")
	return d.query(ctx, demoOutside)
}

// query asks the agent for addresses and shows the answer and its rule.
func (d *demo) query(ctx context.Context, name string) error {
	client := dns.Client{Timeout: dnsproxy.DefaultUpstreamTimeout}
	answer, took, err := client.ExchangeContext(ctx, new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), d.dnsAddr)
	if err != nil {
		return fmt.Errorf("asking the agent on %s for %s: %w", d.dnsAddr, name, err)
	}
	explanation, err := d.agent.Proxy().Explain(name, "A")
	if err != nil {
		return err
	}
	d.out.printf("  %s A\n", d.out.bold(name))
	for _, record := range answer.Answer {
		// Owner, TTL and class are left out: they would not fit a narrow terminal.
		fields := strings.Fields(record.String())
		d.out.printf("      %-5s  %s\n", fields[recordType], fields[recordType+1])
	}
	d.out.paragraph(6, fmt.Sprintf("%s in %s; %s",
		dns.RcodeToString[answer.Rcode], took.Round(10*time.Microsecond), explanation.Why))
	return nil
}

// recordType is the place of the type in a record's text, behind owner, TTL and class;
// the data of a CNAME or an address follows it.
const recordType = 3

// stayUp leaves the reader with something to try, until ctx ends.
func (d *demo) stayUp(ctx context.Context) {
	host, port, _ := net.SplitHostPort(d.dnsAddr) // a listener's own address
	d.out.heading("Still up. Try, in another terminal:")
	d.out.printf("  dig @%s -p %s %s\n", host, port, demoService)
	d.out.printf("  dig @%s -p %s any.objects.example.com +tcp\n", host, port)
	d.out.printf("  bin/nametap query --dns-addr %s --status-addr %s %s\n", d.dnsAddr, d.agent.StatusAddr(), demoNeighbour)
	d.out.printf("  bin/nametap table --status-addr %s\n", d.agent.StatusAddr())
	d.out.printf("and edit the files in %s\n\n^C ends.\n", d.path("shop"))
	<-ctx.Done()
	d.out.printf("\n")
}
