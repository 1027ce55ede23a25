package nds

import "time"

// SilenceDisk makes the disk of a file not answer.
func (c *Config) SilenceDisk(path string) {
	c.disk = newDisk()
	c.disk.reads[path] = &read{began: time.Now(), done: make(chan struct{})}
}
