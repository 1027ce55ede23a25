package main

import (
	"fmt"
	"io"
	"net"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/iptables"
)

// resolve reads the settings. With the switch on it also reads the nameservers of
// resolv.conf, if only their queries are captured.
func (c *captureCommand) resolve() error {
	if err := c.options.resolve(); err != nil {
		return err
	}
	var err error
	if c.config, err = c.options.captureConfig(); err != nil {
		return err
	}
	if c.config.On && c.config.Servers == agent.ResolvConfServers {
		if c.config.Config.Servers, err = agent.CapturedServers(c.config.ResolvConf); err != nil {
			return err
		}
	}
	c.capture, err = iptables.New(c.config.Config, c.options.logger())
	return err
}

// plainDNS reports whether the agent is on port 53, where programs reach it by resolv.conf and not by rules.
// Injection sets that in mode resolv.
func (o *options) plainDNS() bool {
	_, port, err := net.SplitHostPort(o.agent.DNS.Addr)
	return err == nil && port == "53"
}

// printWithoutRules is the status of a pod whose agent is on port 53.
func (c *captureCommand) printWithoutRules(w io.Writer) error {
	result := struct {
		Mode    string `json:"mode"`
		DNSAddr string `json:"dns_addr"`
	}{"resolv", c.options.agent.DNS.Addr}
	return c.print(w, result, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "mode resolv: there are no rules, because the agent is on port 53 (%s %s)\n"+
			"Programs that read resolv.conf send it their queries, if resolv.conf has that address.\n"+
			"Queries to other nameservers are not captured; mode rules of injection captures them.\n", dnsAddrFlag, result.DNSAddr)
		return err
	})
}
