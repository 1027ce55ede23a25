// Command nametap-load sends DNS queries at a steady rate, checks every answer, and prints
// a report as JSON. It runs where the queries of an application would: in a virtual machine
// or a pod.
//
//	nametap-load -rate 2000 -for 1m -expect expect.json
//
// With SIGTERM or SIGINT it stops sending, waits for the answers, and prints the report. The
// exit code is 0, whatever the answers are.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/test/machines/lab/load"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nametap-load:", err)
		os.Exit(1)
	}
}

func run() error {
	server := flag.String("server", "", "the nameserver, ADDRESS or ADDRESS:PORT (default: the first one of /etc/resolv.conf)")
	expect := flag.String("expect", "", "a JSON file with an Expectation: questions and their right answers")
	lasts := flag.Duration("for", 0, "how long to send (default: until SIGTERM)")
	var config load.Config
	flag.IntVar(&config.Rate, "rate", 2000, "queries a second")
	flag.Float64Var(&config.TCP, "tcp", 0.05, "the share of queries over TCP")
	flag.Float64Var(&config.Kept, "kept", 0.2, "the share of queries from sockets that stay open")
	flag.DurationVar(&config.Timeout, "timeout", 0, "the time after which a query is lost (default: 5s)")
	flag.Parse()
	text, err := os.ReadFile(*expect)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &config.Expect); err != nil {
		return err
	}
	if config.Server, err = serverAddr(*server); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	if *lasts > 0 {
		ctx, cancel = context.WithTimeout(ctx, *lasts)
		defer cancel()
	}
	l, err := load.Start(config)
	if err != nil {
		return err
	}
	<-ctx.Done()
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(l.Stop())
}

// serverAddr returns the address and port of the flag -server.
func serverAddr(text string) (netip.AddrPort, error) {
	if text == "" {
		config, err := dns.ClientConfigFromFile("/etc/resolv.conf")
		if err != nil {
			return netip.AddrPort{}, err
		}
		if len(config.Servers) == 0 {
			return netip.AddrPort{}, errors.New("/etc/resolv.conf has no nameserver: use -server")
		}
		text = config.Servers[0]
	}
	if addr, err := netip.ParseAddr(text); err == nil {
		return netip.AddrPortFrom(addr, 53), nil
	}
	return netip.ParseAddrPort(text)
}
