// Command echo is the lower bound for the other servers: one goroutine that reads a UDP
// packet, sets the bit that makes a query a response, and sends it back. It does not parse
// DNS messages.
package main

import (
	"fmt"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: echo ADDRESS:PORT")
		os.Exit(2)
	}
	if err := serve(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

// serve echoes until the socket fails.
func serve(address string) error {
	addr, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		return fmt.Errorf("reading address %q: %w", address, err)
	}
	conn, err := net.ListenUDP("udp", addr)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	buf := make([]byte, 4096)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return fmt.Errorf("reading: %w", err)
		}
		if n < 12 {
			continue // shorter than the header of a DNS message
		}
		buf[2] |= 0x80
		if _, err := conn.WriteToUDPAddrPort(buf[:n], from); err != nil {
			return fmt.Errorf("writing: %w", err)
		}
	}
}
