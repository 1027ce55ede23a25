package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// The demo's names: hosts of the example shop, and one outside the mesh.
const (
	demoService   = "cart"
	demoNeighbour = "auth.platform"
	demoPod       = "postgres-0.postgres.data"
	demoPartner   = "api.payments.example.com"
	demoDatabase1 = "mysql-instance1.us-east-1.rds.amazonaws.com"
	demoDatabase2 = "mysql-instance2.us-east-1.rds.amazonaws.com"
	demoOutside   = "www.example.org"

	demoAddress1 = "203.0.113.11" // the address of demoDatabase1
	demoAddress2 = "203.0.113.12" // the address of demoDatabase2

	demoOutsideAddrs = "2001:db8::80, 203.0.113.80"
)

// upstreamRecords are the records of the demo's nameserver, for names outside the mesh.
var upstreamRecords = []string{ //nolint:gochecknoglobals // a constant list
	demoPartner + ". 60 IN A 203.0.113.20",
	demoDatabase1 + ". 60 IN A " + demoAddress1,
	demoDatabase2 + ". 60 IN A " + demoAddress2,
	demoOutside + ". 300 IN A 203.0.113.80",
	demoOutside + ". 300 IN AAAA 2001:db8::80",
}

// showEdit changes the address of demoService from demoOldAddress to demoNewAddress.
const (
	demoOldAddress = "10.96.10.12"
	demoNewAddress = "10.96.10.99"
)

// tour sends queries to the agent and shows the answers.
func (d *demo) tour(ctx context.Context) error {
	d.out.printf("%s\n\n", d.out.bold("nametap: a control plane, an agent and a tour in one process, on loopback"))
	d.out.printf("  control plane  %s, serves %s\n", d.controlPlane.Addr(), d.path("shop"))
	d.out.printf("  agent          %s, UDP and TCP; %d hosts\n", d.dnsAddr, d.agent.Proxy().Table().Len())
	d.out.printf("  status         http://%s/metrics\n", d.agent.StatusAddr())
	d.out.printf("  nameserver     %s, part of the demo, for names outside the mesh\n", d.upstream.Addr)
	d.out.printf("  resolv.conf    search %s\n", strings.Join(searchList(), " "))
	for _, step := range []func(context.Context) error{d.showNames, d.showCounts, d.showCapture, d.showEdit} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) showNames(ctx context.Context) error {
	domain := "." + searchList()[0]
	for _, section := range []struct {
		heading string
		names   []string
	}{
		{"Hosts of the mesh, by short names and by an FQDN", []string{demoService, demoService + domain, demoNeighbour, demoPod}},
		{"A name with a search domain, as a pod sends it: one answer with the addresses", []string{demoPartner + domain}},
		{"Names outside the mesh, and two databases without an address in it: forwarded", []string{demoOutside, demoDatabase1, demoDatabase2}},
	} {
		d.out.heading(section.heading)
		for _, name := range section.names {
			if err := d.query(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// showCounts counts the queries that one getaddrinfo sends, and those that arrive at the nameserver.
func (d *demo) showCounts(ctx context.Context) error {
	d.out.heading("Queries of getaddrinfo(\"api.payments…\"), ndots:5, three search domains")
	d.out.printf("                         queries sent   to the nameserver\n")
	for _, way := range []struct{ name, server string }{
		{"without nametap", d.upstream.Addr.String()}, {"with nametap", d.dnsAddr},
	} {
		d.upstream.Reset()
		client := stubResolver{server: way.server}
		if _, err := client.getaddrinfo(ctx, demoPartner); err != nil {
			return err
		}
		d.out.printf("  %-15s        %12d   %17d\n", way.name, client.sent, len(d.upstream.Queries()))
	}
	return nil
}

// showEdit changes a file of the control plane and waits until the agent's answer changes.
func (d *demo) showEdit(ctx context.Context) error {
	d.out.heading("A live edit: " + demoService + " moves from " + demoOldAddress + " to " + demoNewAddress)
	path := d.path("shop/shop.yaml")
	text, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, bytes.ReplaceAll(text, []byte(demoOldAddress), []byte(demoNewAddress)), readable)
	}
	if err != nil {
		return fmt.Errorf("editing an example: %w", err)
	}
	start, client := time.Now(), stubResolver{server: d.dnsAddr}
	for addrs := []string(nil); !slices.Contains(addrs, demoNewAddress); time.Sleep(time.Millisecond) {
		if addrs, err = client.getaddrinfo(ctx, demoService); err != nil {
			return err
		}
	}
	d.out.printf("  answered %s after the file was written\n",
		d.out.bold(time.Since(start).Round(time.Millisecond).String()))
	return d.query(ctx, demoService)
}

// query sends a query for addresses to the agent, and shows the answer and its reason.
func (d *demo) query(ctx context.Context, name string) error {
	answer, took, err := exchange(ctx, d.dnsAddr, dns.Fqdn(name), dns.TypeA)
	if err != nil {
		return fmt.Errorf("querying the agent on %s for %s: %w", d.dnsAddr, name, err)
	}
	explanation, err := d.agent.Proxy().Explain(name, "A")
	if err != nil {
		return err
	}
	d.out.printf("  %s A\n", d.out.bold(name))
	for _, record := range answer.Answer { // without owner, TTL and class, to fit a narrow terminal
		d.out.printf("      %-5s  %s\n", dns.TypeToString[record.Header().Rrtype], dns.Field(record, 1))
	}
	d.out.detail(6, fmt.Sprintf("%s in %s; %s",
		dns.RcodeToString[answer.Rcode], took.Round(10*time.Microsecond), explanation.Why))
	return nil
}

// stayUp prints commands to try, and waits until ctx ends.
func (d *demo) stayUp(ctx context.Context) {
	host, port, _ := net.SplitHostPort(d.dnsAddr) // never fails: it is the address of a listener
	d.out.heading("The demo keeps running. Try in another terminal:")
	d.out.printf("  dig @%s -p %s %s\n", host, port, demoService)
	d.out.printf("  dig @%s -p %s any.objects.example.com +tcp\n", host, port)
	d.out.printf("  bin/demo/nametap query --dns-addr %s --status-addr %s --state-dir %s %s\n", d.dnsAddr,
		d.agent.StatusAddr(), d.path("agent"), demoNeighbour)
	d.out.printf("  bin/demo/nametap table --status-addr %s --state-dir %s\n", d.agent.StatusAddr(), d.path("agent"))
	d.out.printf("or edit the files in %s\n\nPress ^C to end the demo.\n", d.path("shop"))
	<-ctx.Done()
	d.out.printf("\n")
}

// A stubResolver resolves names like glibc's getaddrinfo: it walks the search list, queries A
// and AAAA of each name, and stops at the first name that has an address. Like glibc by
// default, it does not use EDNS.
type stubResolver struct {
	server string // host:port
	sent   int    // queries so far
}

// getaddrinfo returns the addresses of name. It returns no error if there are none.
func (r *stubResolver) getaddrinfo(ctx context.Context, name string) (addrs []string, err error) {
	config := dns.ClientConfig{Search: searchList(), Ndots: demoNdots}
	for _, candidate := range config.NameList(name) {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			r.sent++
			resp, _, err := exchange(ctx, r.server, candidate, qtype)
			if err != nil {
				return nil, err
			}
			for _, rr := range resp.Answer {
				if rr.Header().Rrtype == qtype {
					addrs = append(addrs, dns.Field(rr, 1))
				}
			}
		}
		if len(addrs) > 0 {
			break
		}
	}
	return addrs, nil
}

// exchange sends one query. It ends with ctx, also while it waits for the answer.
func exchange(ctx context.Context, server, name string, qtype uint16) (*dns.Msg, time.Duration, error) {
	client := dns.Client{Timeout: patience}
	conn, err := client.DialContext(ctx, server)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	return client.ExchangeWithConnContext(ctx, new(dns.Msg).SetQuestion(name, qtype), conn)
}
