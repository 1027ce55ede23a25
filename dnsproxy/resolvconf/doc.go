// Package resolvconf reads resolv.conf(5), which names the nameservers, and watches
// it for changes.
//
//	files := resolvconf.Files{} // /etc/resolv.conf
//	conf, err := files.Read()
//	…
//	watcher := resolvconf.Watcher{Files: files, Current: conf, Changed: use, Failed: count}
//	err = watcher.Run(ctx)
package resolvconf
